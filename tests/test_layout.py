"""Imports run one way, the runtime needs no compiler, and every public name exists."""

import ast
import importlib
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

import draftwood
from draftwood.tests.house.imports import circles, room_imports
from draftwood.tests.house.imports import imports as imports_between
from draftwood.tests.house.imports import modules as modules_by_name

PACKAGE = Path(draftwood.__file__).parent
FACE = PACKAGE / "__init__.py"
ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("trees", "kernels", "compiler", "runtime", "tools")
# Modules of the root that compiler and runtime share.
SHARED = {"contract", "errors", "environment", "files", "manifest", "noise", "planned", "telemetry", "threads"}
SHARED |= {"version", "versions"}
# The parts of the project that each folder may import; "" is the root package itself.
MAY_IMPORT = {
    "": {"errors", "environment", "files", "manifest", "noise", "planned", "version"},
    "trees": {"errors", "files", "planned", "trees"},
    "kernels": {"errors", "trees", "kernels"},
    "compiler": SHARED | {"trees", "kernels", "compiler"},
    "runtime": SHARED | {"trees", "runtime"},
}
# The way of a build, folder by folder: each imports those before it only.
COMPILER = ("checkpoints", "teachers", "ranks", "steps", "drafters", "onnx", "ge", "targets", "bundle")
FORBIDDEN_WORDS = ("/wo" + "rk/", "../sha" + "red", "sha" + "red/research", "sha" + "red/data")
TEXT = {".py", ".md", ".toml", ".json", ".jsonl", ".txt", ".jinja", ".sh", ".yml", ".yaml", ""}


def modules(folder: str) -> list[Path]:
    """The Python files of a folder of the installed package; "" stands for the modules at its root, the face aside."""
    return sorted((PACKAGE / folder).rglob("*.py") if folder else set(PACKAGE.glob("*.py")) - {FACE})


@cache
def imports(source: str) -> tuple[str, ...]:
    """Dotted names of all that `source` imports, at any level, by statement or by literal name."""
    return tuple(_imports(source))


def _imports(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module="draftwood", names=names):
                yield from (f"draftwood.{alias.name}" for alias in names)
            case ast.ImportFrom(module=module, level=level):
                # A relative import counts as one of nothing that is allowed: they are all written out.
                yield "draftwood.relative" if level else str(module)
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module" | "__import__"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield name


def part(name: str) -> str:
    """The folder or root module of the project that a dotted name lies in."""
    _, _, rest = name.partition(".")
    return rest.partition(".")[0]


def foreign(source: str) -> set[str]:
    """Top-level names of the other distributions that `source` imports."""
    tops = {name.partition(".")[0] for name in imports(source)}
    return tops - set(sys.stdlib_module_names) - {"draftwood"}


@pytest.mark.parametrize("folder", MAY_IMPORT, ids=lambda folder: folder or "root")
def test_imports_run_downwards(folder: str) -> None:
    for path in modules(folder):
        used = {part(name) for name in imports(path.read_text()) if name.partition(".")[0] == "draftwood"}
        assert used <= MAY_IMPORT[folder], f"{path} imports {used - MAY_IMPORT[folder]}"


def test_importing_the_package_imports_next_to_nothing(python: Callable[..., str]) -> None:
    """Its functions import their needs when they are called."""
    code = "import sys, draftwood; print(*sorted(name for name in sys.modules if name.startswith('draftwood')))"
    assert python(code).split() == ["draftwood", "draftwood.environment", "draftwood.telemetry", "draftwood.version"]
    heavy = "import sys, draftwood; print({'numpy', 'torch', 'onnxruntime', 'msgspec'} & set(sys.modules))"
    assert python(heavy).strip() == "set()"


def test_the_runtime_loads_onnxruntime_only_where_an_engine_needs_it(python: Callable[..., str]) -> None:
    assert python("import sys, draftwood.runtime.decoding; print('onnxruntime' in sys.modules)").strip() == "False"


def test_neither_files_nor_rooms_import_each_other() -> None:
    found = modules_by_name()
    assert circles(imports_between(found)) == circles(room_imports(found)) == []


def test_a_build_goes_one_way() -> None:
    order = {f"compiler/{folder}": number for number, folder in enumerate(COMPILER)}
    pairs = [pair for pair in room_imports(modules_by_name()) if set(pair) <= set(order)]
    assert {name for pair in pairs for name in pair} == set(order)
    assert [pair for pair in pairs if order[pair[0]] < order[pair[1]]] == []


def test_every_folder_of_modules_is_installed() -> None:
    """A folder that pyproject.toml does not name works in a clone and is missing in an installation."""
    named = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    found = {".".join(("draftwood", *path.parent.relative_to(ROOT).parts)) for path in files}
    in_a_clone = {name for name in found if name.startswith("draftwood.tools.benchmarks")}
    assert in_a_clone and named == found - in_a_clone | {"draftwood"}


def test_nothing_installed_imports_the_benchmarks() -> None:
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py") if "benchmarks" not in path.parts]
    assert [path.name for path in files if "tools.benchmarks" in path.read_text()] == []


def test_trees_need_two_packages() -> None:
    assert set().union(*(foreign(path.read_text()) for path in modules("trees"))) <= {"msgspec", "numpy"}


# Imported by the call that needs it, which says in one line where it is missing.
WHEN_ASKED_FOR = {
    "runtime/text/grammar.py": {"llguidance"},
    "telemetry.py": {"openvino"},
    "runtime/engines/qnn.py": {"onnxruntime_qnn"},
}


@pytest.mark.parametrize("folder", ["runtime", ""], ids=["runtime", "root"])
def test_what_is_deployed_imports_base_dependencies_alone(folder: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    base = {requirement.partition(">")[0] for requirement in project["dependencies"]}
    for path in modules(folder):
        assert foreign(path.read_text()) <= base | WHEN_ASKED_FOR.get(path.relative_to(PACKAGE).as_posix(), set()), path


def test_one_module_at_most_touches_the_npu_stack() -> None:
    paths = [path for folder in ("", *FOLDERS) for path in modules(folder)]
    assert len([path for path in paths if foreign(path.read_text()) & {"torch_npu", "torchair"}]) <= 1


@pytest.mark.parametrize(
    "source",
    [
        "def f():\n import draftwood.tools",
        "from draftwood import tools",
        "import_module('draftwood.tools.cli')",
    ],
)
def test_hidden_imports_are_found(source: str) -> None:
    assert "tools" in {part(name) for name in imports(source)}


@pytest.mark.parametrize("package", ["trees", "runtime"])
def test_imports_without_the_compilers_packages(package: str, python: Callable[..., str]) -> None:
    code = f"""
import importlib, pkgutil, draftwood.{package} as package
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    importlib.import_module(module.name)
    print(module.name)
"""
    blocked = ["torch", "onnx", "onnxscript", "networkx", "matplotlib", "safetensors", "transformers"]
    blocked += ["openvino", "onnxruntime_qnn"]
    blocked += [f"draftwood.{folder}" for folder in ("kernels", "compiler", "tools")]
    assert len(python(code, blocked).split()) == len(modules(package)) - 1


@pytest.mark.parametrize("package", ["", *FOLDERS], ids=lambda package: package or "root")
def test_public_names_exist(package: str) -> None:
    module = importlib.import_module(f"draftwood.{package}" if package else "draftwood")
    names = getattr(module, "__all__", [])
    assert [name for name in names if not hasattr(module, name)] == []
    assert len(names) == len(set(names))


def project_files(folder: Path) -> Iterator[Path]:
    """Text files of the checkout, without the remains of tools and environments."""
    for path in sorted(folder.iterdir()):
        hidden = path.name.startswith(".") and path.name not in {".ci", ".gitignore"}
        generated = path.name in {"build", "dist", "__pycache__"} or path.name.endswith(".egg-info")
        if hidden or generated or (path / "pyvenv.cfg").exists():
            continue
        if path.is_dir():
            yield from project_files(path)
        elif path.suffix in TEXT or path.name == ".gitignore":
            yield path


def test_no_file_names_the_machine_it_was_written_on() -> None:
    named = {
        f"{path.relative_to(ROOT)}: {word}"
        for path in project_files(ROOT)
        for word in FORBIDDEN_WORDS
        if word in path.read_text(encoding="utf-8")
    }
    assert not named


def test_a_class_name_stands_once() -> None:
    owners: dict[str, set[str]] = {}
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            for found in re.finditer(r"^ *class (\w+)[:(\[]", path.read_text(), re.MULTILINE):
                owners.setdefault(found[1], set()).add(f"{path.relative_to(ROOT)}:{found.start()}")
    assert {name: places for name, places in owners.items() if len(places) > 1} == {}
