"""The launcher ./draft: what it installs when, what it believes after an interruption, and what it says.

A stand-in takes the place of the environment's Python. It notes its calls. Called as pip, it does as a test tells it;
otherwise it prints its words. Nothing is installed.
"""

import ast
import errno
import importlib.metadata
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from importlib.machinery import SourceFileLoader
from pathlib import Path
from socket import create_server
from types import ModuleType, SimpleNamespace

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from draftwood.environment import AUTOLOAD

ROOT = Path(__file__).resolve().parents[1]
# What CI, itself a caller of ./draft, may have set.
OURS = ("DRAFT_EXTRAS", "DRAFT_PYTHON", "PYTHON")
STAND_IN = """#!/bin/sh
echo "$@" >> "{calls}"
case "$*" in
"-m pip "*) . "{pip}" ;;
*) echo "in $(pwd): $*"; exit 7 ;;
esac
"""


class Clone:
    """A clone with a stand-in environment that has nothing installed yet."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        for name in ("draft", "pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / name, folder)
        shutil.copytree(ROOT / "runtime" / "engines", folder / "runtime" / "engines")
        self.folder, self.calls, self.pip = folder, folder / "calls", folder / "pip.sh"
        self.calls.touch()
        self.pip.touch()
        self.module = load(folder / "draft")
        self.module.PYTHON.parent.mkdir(parents=True)
        self.module.PYTHON.write_text(STAND_IN.format(calls=self.calls, pip=self.pip))
        self.module.PYTHON.chmod(0o755)
        self.site = self.module.VENV / "lib" / "python3.11" / "site-packages"
        self.site.mkdir(parents=True)
        self.module.write_stamp(root=str(folder), python=self.module.this_python(), key="", extras=[])

    def start(self, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        inherited = {name: value for name, value in os.environ.items() if name not in OURS}
        # A proxy that refuses at once: no test asks PyTorch's index.
        environment = {**inherited, "https_proxy": "http://127.0.0.1:9", **variables}
        return subprocess.Popen(
            [sys.executable, self.folder / "draft", *arguments],
            cwd=self.folder.parent, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def run(self, *arguments: str, **variables: str) -> tuple[int, str, str]:
        process = self.start(*arguments, **variables)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err

    def machine(self, variables: dict[str, str]) -> list[str]:
        """The folders that the launcher finds in a process of its own."""
        code = (
            "import sys; from importlib.machinery import SourceFileLoader as L; from importlib.util import *;"
            f"l = L('draft', {str(self.folder / 'draft')!r}); m = module_from_spec(spec_from_loader('draft', l));"
            "l.exec_module(m); print(*m.machine(), sep=chr(10))"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, **variables}, capture_output=True, text=True
        )
        return done.stdout.split()

    def installs(self) -> list[str]:
        """pip's requests since the last call, without the parts that never change."""
        lines = [line for line in self.calls.read_text().splitlines() if line.startswith("-m pip")]
        self.calls.write_text("")
        return [line.partition("constraints.txt ")[2] for line in lines]


def load(path: Path) -> ModuleType:
    loader = SourceFileLoader("draft", str(path))
    spec = importlib.util.spec_from_loader("draft", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def until(condition: Callable[[], object]) -> None:
    ends = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.02)


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Clone:
    for name in OURS:
        monkeypatch.delenv(name, raising=False)
    return Clone(tmp_path / "clone")


def test_an_older_python_can_read_it() -> None:
    ast.parse((ROOT / "draft").read_text(), feature_version=(3, 6))


def test_alone_it_says_how_it_is_used_and_makes_nothing(tmp_path: Path) -> None:
    shutil.copy(ROOT / "draft", tmp_path)
    done = subprocess.run([sys.executable, tmp_path / "draft"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "./draft test [ARGS]" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["draft"]


def test_the_first_call_installs_and_the_second_does_not(clone: Clone) -> None:
    code, out, err = clone.run("demo", "--json")
    assert (code, out) == (7, f"in {clone.folder.parent}: -P -m draftwood.tools.cli demo --json\n")
    assert clone.installs() == ["--no-deps torch==2.13.0", "--editable .[build]"]
    assert all(line.startswith("draft: ") for line in err.splitlines())
    assert clone.run("demo")[2] == "" and clone.installs() == []


def test_a_command_without_torch_installs_none(clone: Clone) -> None:
    clone.run("inspect", "full:3x2")
    assert clone.installs() == ["--editable ."]
    clone.run("demo")
    assert clone.installs() == ["--no-deps torch==2.13.0", "--editable .[build]"]
    clone.run("inspect", "full:3x2")
    assert clone.installs() == []


def test_tests_run_in_the_root_and_pass_their_arguments_on(clone: Clone) -> None:
    assert clone.run("test", "-k", "two words")[:2] == (7, f"in {clone.folder}: -P -m pytest -q -k two words\n")
    assert clone.installs()[-1] == "--editable .[build,cluster,dev,npu,openvino,qnn,reference,serve]"


def test_all_tests_run_beside_each_other(clone: Clone) -> None:
    said = f"in {clone.folder}: -P -m pytest -q -n auto --maxprocesses 4 --dist loadfile --max-worker-restart 0\n"
    assert clone.run("test")[:2] == (7, said)


def test_python_is_the_environments(clone: Clone) -> None:
    assert clone.run("python", "-c", "1")[1] == f"in {clone.folder.parent}: -P -c 1\n"


def test_extras_can_be_asked_for(clone: Clone) -> None:
    clone.run("doctor", DRAFT_EXTRAS="npu")
    assert clone.installs()[-1] == "--editable .[build,npu]"
    code, _, err = clone.run("doctor", DRAFT_EXTRAS="gpu")
    assert code == 2
    assert (
        err.splitlines()[-1]
        == "draft: error: DRAFT_EXTRAS=gpu: expected of build, cluster, dev, device, npu, openvino, peers, qnn,"
        " reference, report, serve"
    )


@pytest.mark.parametrize(
    ("line", "extras"),
    [
        ("check BUNDLE --engine qnn", "build,qnn"),
        ("run BUNDLE --engine=openvino-npu --prompt x", "openvino"),
        ("run BUNDLE --engine eager --prompt x", "build"),
        ("build --model demo --target onnx,ge --out BUNDLE", "build,npu"),
    ],
)
def test_engines_and_targets_bring_what_they_need(clone: Clone, line: str, extras: str) -> None:
    clone.run(*line.split())
    assert clone.installs()[-1] == f"--editable .[{extras}]"


@pytest.fixture
def npu_machine(tmp_path: Path) -> dict[str, str]:
    """Variables of a machine with an NPU: CANN's set_env.sh was read, and Python has torch_npu."""
    site = tmp_path / "machine" / "site-packages"
    (site / "torch_npu").mkdir(parents=True)
    (site / "torch_npu" / "__init__.py").touch()
    return {"ASCEND_HOME_PATH": str(tmp_path / "cann"), "PYTHONPATH": str(site)}


@pytest.mark.parametrize("line", ["doctor --npu", "build --model demo --target ge", "run BUNDLE --engine npu"])
def test_beside_the_machines_torch_npu_nothing_is_pinned(clone: Clone, npu_machine: dict[str, str], line: str) -> None:
    """Neither its torch is replaced nor its numpy, and GE still finds CANN's Python in PYTHONPATH."""
    folders = clone.machine(npu_machine)
    assert npu_machine["PYTHONPATH"] in folders
    clone.module.write_stamp(
        root=str(clone.folder), python=clone.module.this_python(), key="", extras=[], machine=folders
    )
    assert clone.run(*line.split(), **npu_machine)[0] == 7
    assert "-m pip install --quiet --editable .[device]" in clone.calls.read_text().splitlines()
    assert clone.run(*line.split(), **npu_machine)[2] == "" == clone.run(*line.split())[2], "without set_env.sh, too"


def test_an_environment_beside_torch_npu_sees_the_machines_packages(
    clone: Clone, npu_machine: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clone.module, "machine", lambda: [npu_machine["PYTHONPATH"]])
    monkeypatch.setattr(clone.module, "run", lambda lock, command: clone.site.mkdir(parents=True))
    clone.site = clone.module.VENV / "lib" / "python{}.{}".format(*sys.version_info[:2]) / "site-packages"
    clone.module.new_environment(None)
    assert [path.read_text().split() for path in clone.site.glob("*.pth")] == [[npu_machine["PYTHONPATH"]]]
    monkeypatch.setenv("PYTHONPATH", "of-cann")
    assert clone.module.environment()["PYTHONPATH"] == "of-cann"


def test_what_is_no_flag_brings_nothing(clone: Clone) -> None:
    clone.run("run", "BUNDLE", "--prompt", "take --engine qnn", "--engine", "cpu")
    assert clone.installs() == ["--editable ."]


@pytest.mark.parametrize(
    ("name", "old", "new", "installs"),
    [
        ("constraints.txt", "numpy==", "numpy==1", True),
        ("pyproject.toml", "jinja2>=3.1.6", "jinja2>=3.1.7", True),
        ("pyproject.toml", "line-length = 120", "line-length = 100", False),
    ],
    ids=["pin", "dependency", "linter"],
)
def test_what_decides_the_packages_decides_the_installation(
    clone: Clone, name: str, old: str, new: str, installs: bool
) -> None:
    clone.run("doctor")
    clone.installs()
    path = clone.folder / name
    path.write_text(path.read_text().replace(old, new))
    clone.run("doctor")
    assert bool(clone.installs()) == installs


def test_an_environment_of_another_place_is_made_anew(clone: Clone, monkeypatch: pytest.MonkeyPatch) -> None:
    clone.run("doctor")
    moved = clone.folder.rename(clone.folder.with_name("moved"))
    module, made = load(moved / "draft"), []
    monkeypatch.setattr(module, "new_environment", lambda lock: made.append(lock))
    monkeypatch.setattr(module, "pip", lambda lock, *arguments: None)
    assert not module.ready(set())
    module.prepare(set(), "doctor")
    assert len(made) == 1 and module.ready(set())


def test_an_environment_stays_until_another_python_is_asked_for(clone: Clone, monkeypatch: pytest.MonkeyPatch) -> None:
    clone.run("doctor")
    monkeypatch.setattr(clone.module, "this_python", lambda: "3.12 of /elsewhere")
    assert clone.module.ready(set())
    monkeypatch.setenv("DRAFT_PYTHON", "python3.12")
    assert not clone.module.ready(set())


def test_a_killed_installation_is_not_believed_and_its_pip_is_waited_for(clone: Clone) -> None:
    clone.pip.write_text(f"touch {clone.folder}/begun; while [ ! -e {clone.folder}/go ]; do sleep 0.05; done")
    first = clone.start("doctor")
    until((clone.folder / "begun").exists)
    first.send_signal(signal.SIGKILL)
    first.communicate(timeout=60)
    second = clone.start("doctor")
    assert second.stderr is not None
    assert second.stderr.readline() == "draft: another ./draft prepares the environment; waiting for it\n"
    assert len(clone.installs()) == 1
    (clone.folder / "go").touch()
    second.communicate(timeout=60)
    assert second.returncode == 7 and clone.installs() == ["--editable ."]


def test_a_second_process_uses_what_the_first_made(clone: Clone) -> None:
    clone.pip.write_text(f"touch {clone.folder}/begun; while [ ! -e {clone.folder}/go ]; do sleep 0.05; done")
    first = clone.start("doctor")
    until((clone.folder / "begun").exists)
    second = clone.start("doctor")
    assert second.stderr is not None and "waiting" in second.stderr.readline()
    (clone.folder / "go").touch()
    for process in (first, second):
        process.communicate(timeout=60)
        assert process.returncode == 7
    assert len(clone.installs()) == 1


def test_tools_that_read_source_find_the_folders_under_their_names(clone: Clone) -> None:
    clone.run("doctor")
    assert (clone.folder / ".draft/src/draftwood/pyproject.toml").samefile(clone.folder / "pyproject.toml")


def test_torch_npu_without_cann_breaks_neither_torch_nor_transformers() -> None:
    if not (Path(sys.prefix) / "draft.json").exists():
        pytest.skip("not an environment that ./draft has made")
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", AUTOLOAD)}
    code = "import torch; from transformers import LlamaForCausalLM"
    subprocess.run([sys.executable, "-P", "-c", code], env=variables, check=True)


def test_half_installed_packages_go(clone: Clone) -> None:
    for name in ("whole-1.dist-info", "half-1.dist-info", "~old"):
        (clone.site / name).mkdir()
    (clone.site / "whole-1.dist-info" / "RECORD").touch()
    clone.module.drop_half_installed()
    assert [path.name for path in clone.site.iterdir()] == ["whole-1.dist-info"]


@pytest.mark.parametrize(
    ("output", "said"),
    [
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", "disk is full"),
        ("ERROR: Could not install packages due to an OSError: [Errno 13] Permission denied: x", "cannot be written"),
        ("WARNING: Retrying ... NewConnectionError(...): [Errno 111] Connection refused", "no network"),
        ("WARNING: Retrying ... NameResolutionError: Temporary failure in name resolution", "no network"),
        ("WARNING: Retrying ... SSLError(SSLCertVerificationError(1, '[SSL: CERTIFICATE_VERIFY_FAILED]", "PIP_CERT"),
        ("x\nERROR: No matching distribution found for torch==2.13.0\ny", "No matching distribution found for torch"),
        ("", "installing failed (1)"),
    ],
    ids=["space", "access", "refused", "name", "certificate", "other", "nothing"],
)
def test_what_stops_pip_is_one_line(clone: Clone, output: str, said: str) -> None:
    (clone.folder / "output").write_text(output)
    clone.pip.write_text(f"cat {clone.folder}/output; exit 1")
    code, out, err = clone.run("doctor")
    assert (code, out) == (2, "")
    errors = [line for line in err.splitlines() if "error:" in line]
    assert len(errors) == 1 and said in errors[0] and err.endswith(errors[0] + "\n")
    assert not clone.module.ready(set())


@pytest.mark.parametrize(
    ("number", "said"),
    [(errno.ENOSPC, "the disk is full"), (errno.EACCES, "cannot be written"), (errno.EROFS, "cannot be written")],
    ids=["space", "access", "read-only"],
)
def test_what_the_file_system_refuses_is_one_line(
    clone: Clone, monkeypatch: pytest.MonkeyPatch, number: int, said: str
) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(number, os.strerror(number), "x")

    monkeypatch.setattr(clone.module.Path, "mkdir", refuse)
    with pytest.raises(clone.module.Refusal, match=said):
        clone.module.prepare(set(), "doctor")


def test_too_small_a_disk_is_said_before_anything_is_made(clone: Clone, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(clone.module.VENV)
    monkeypatch.setattr(clone.module.shutil, "disk_usage", lambda path: SimpleNamespace(free=5_000_000))
    with pytest.raises(clone.module.Refusal, match=r"5 MB are free .* about 1900 MB are needed"):
        clone.module.prepare({"build"}, "demo")
    assert not clone.module.VENV.exists()


def test_a_python_without_venv_names_the_package(clone: Clone, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "ensurepip" else object())
    with pytest.raises(clone.module.Refusal, match=r"apt install python3\.\d+-venv"):
        clone.module.new_environment(None)


def test_a_python_that_is_too_old_says_so(clone: Clone, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(clone.module, "OLDEST", (9, 1))
    with pytest.raises(clone.module.Refusal, match=r"needed, this is 3.* install one, or name it"):
        clone.module.take_a_python()


def test_a_newer_python_on_the_path_is_taken(clone: Clone, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    newer = tmp_path / "python3.12"
    newer.write_text('#!/bin/sh\necho "newer: $@"\n')
    newer.chmod(0o755)
    started: list[list[str]] = []
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["draft", "demo"])
    monkeypatch.setattr(clone.module.os, "execv", lambda path, words: started.append(words))
    monkeypatch.setattr(clone.module.sys, "version_info", (3, 8, 0))
    with pytest.raises(clone.module.Refusal):  # where the stand-in for execv comes back
        clone.module.take_a_python()
    assert started == [[str(newer), str(clone.folder / "draft"), "demo"]]
    monkeypatch.undo()
    assert clone.run("demo", PYTHON=str(newer))[:2] == (0, f"newer: {clone.folder}/draft demo\n")
    assert clone.run("demo", PYTHON="python9")[2] == "draft: error: PYTHON=python9: no such program\n"


def test_an_index_that_does_not_answer_is_given_up(clone: Clone, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clone.module, "TORCH_INDEX_SECONDS", 1)
    with closing(create_server(("127.0.0.1", 0))) as silent:
        began = time.monotonic()
        assert not clone.module.reachable(f"http://127.0.0.1:{silent.getsockname()[1]}")
    assert time.monotonic() - began < 5  # 6 without the second that is set here


def test_torch_comes_from_its_index_for_cpus_where_that_answers(clone: Clone, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(clone.module, "reachable", lambda index: True)
    monkeypatch.setattr(clone.module, "pip", lambda lock, *arguments: asked.append(arguments))
    monkeypatch.setattr(clone.module.sys, "platform", "linux")
    clone.module.install_torch(None)
    monkeypatch.setattr(clone.module.sys, "platform", "darwin")
    clone.module.install_torch(None)
    (clone.site / "torch-2.13.0+cpu.dist-info").mkdir()
    clone.module.install_torch(None)
    plain = ("--no-deps", "torch==2.13.0")
    assert asked == [(*plain, "--index-url", "https://download.pytorch.org/whl/cpu"), plain]


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    names = (line.split("==") for line in lines if not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in names}


def test_every_package_of_every_extra_is_pinned() -> None:
    # setuptools comes with an environment and builds it. Where PyTorch's own index cannot be reached, torch brings CUDA
    # in versions that it names itself.
    brought = set(closure("torch", set())) if Version(importlib.metadata.version("torch")).local != "cpu" else set()
    assert set(closure("draftwood", {"dev"})) - {"draftwood", "setuptools"} - brought <= set(pins())


@pytest.mark.skipif(not (Path(sys.prefix) / "draft.json").exists(), reason="an environment that ./draft did not make")
def test_what_is_installed_is_what_is_pinned() -> None:
    installed = {name: version.partition("+")[0] for name, version in closure("draftwood", {"dev"}).items()}
    assert {name: installed[name] for name, pin in pins().items() if installed.get(name, pin) != pin} == {}


def closure(name: str, extras: set[str]) -> dict[str, str]:
    """The versions of all that a distribution and some of its extras bring, as far as they are installed."""
    found: dict[str, str] = {}
    pending, met = [(name, frozenset(extras))], set()
    while pending:
        met.add(one := pending.pop())
        try:
            distribution = importlib.metadata.distribution(one[0])
        except importlib.metadata.PackageNotFoundError:
            continue
        found[canonicalize_name(one[0])] = distribution.version
        for requirement in map(Requirement, distribution.requires or ()):
            marker = requirement.marker
            new = canonicalize_name(requirement.name), frozenset(requirement.extras)
            asked = marker is None or any(marker.evaluate({"extra": extra}) for extra in (*one[1], ""))
            if asked and new not in met:
                pending.append(new)
    return found
