"""The launcher ./draft: its installations, its beliefs after an interruption, and its messages.

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
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from draftwood.environment import AUTOLOAD

ROOT = Path(__file__).resolve().parents[1]
# Seconds until an event that has to come, on a busy machine, too.
WAIT = 300
# Variables that CI, itself a caller of ./draft, may have set.
OURS = ("DRAFT_EXTRAS", "ASCEND_HOME_PATH")
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
        for name in ("draft", "pyproject.toml", "constraints.txt", "runtime/engines/registry.py"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
        self.folder, self.calls, self.pip = folder, folder / "calls", folder / "pip.sh"
        self.calls.touch()
        self.pip.touch()
        self.module = load(folder / "draft")
        self.module.PYTHON.parent.mkdir(parents=True)
        self.module.PYTHON.write_text(STAND_IN.format(calls=self.calls, pip=self.pip))
        self.module.PYTHON.chmod(0o755)
        self.site = self.module.VENV / "lib" / "python3.11" / "site-packages"
        self.site.mkdir(parents=True)
        (self.module.VENV / "pyvenv.cfg").touch()
        self.module.STAMP.write_text('{"content": "not whole", "extras": []}')

    def start(self, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        inherited = {name: value for name, value in os.environ.items() if name not in OURS}
        environment = {**inherited, **variables}
        return subprocess.Popen(
            [sys.executable, self.folder / "draft", *arguments],
            cwd=self.folder.parent, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def run(self, *arguments: str, **variables: str) -> tuple[int, str, str]:
        process = self.start(*arguments, **variables)
        out, err = process.communicate(timeout=WAIT)
        return process.returncode, out, err

    def installs(self) -> list[str]:
        """pip's requests since the last call, without the parts that never change."""
        lines = [line for line in self.calls.read_text().splitlines() if line.startswith("-m pip")]
        self.calls.write_text("")
        return [line.partition("constraints.txt ")[2].partition(" --extra-index-url")[0] for line in lines]


def load(path: Path) -> ModuleType:
    loader = SourceFileLoader("draft", str(path))
    spec = importlib.util.spec_from_loader("draft", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def until(condition: Callable[[], object]) -> None:
    ends = time.monotonic() + WAIT
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
    done = subprocess.run([sys.executable, tmp_path / "draft"], capture_output=True, text=True, timeout=WAIT)
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
        " reference, serve"
    )


@pytest.mark.parametrize(
    ("line", "extras"),
    [
        ("check BUNDLE --engine qnn", "build,qnn"),
        ("run BUNDLE --engine=openvino-npu --prompt x", "openvino"),
        ("run BUNDLE --engine eager --prompt x", "build"),
        ("build demo --target onnx,ge --out BUNDLE", "build,npu"),
        ("make demo --device ascend-910b3 --out BUNDLE", "build,npu"),
        ("profile demo --device ascend-910b3 --out TIMES", "build"),
        ("check BUNDLE --teacher demo", "build,reference"),
        ("calibrate demo --workers 10.0.0.1:6379", "build,cluster,serve"),
        ("inspect --json shape:qwen3-8b", "build"),
        ("inspect model.gguf", "build"),
        ("inspect /", "build"),
    ],
)
def test_engines_and_targets_bring_what_they_need(clone: Clone, line: str, extras: str) -> None:
    clone.run(*line.split())
    assert clone.installs()[-1] == f"--editable .[{extras}]"


@pytest.fixture
def npu_machine(tmp_path: Path) -> dict[str, str]:
    """Variables of a machine with an NPU: CANN's set_env.sh was read, and Python has torch_npu."""
    folder = tmp_path / "of-cann" / "torch_npu"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    return {"ASCEND_HOME_PATH": str(tmp_path / "cann"), "PYTHONPATH": str(folder.parent)}


@pytest.mark.parametrize("line", ["doctor --npu", "build demo --target ge", "run BUNDLE --engine npu"])
def test_next_to_the_machines_torch_npu_nothing_is_pinned(clone: Clone, line: str) -> None:
    """Neither its torch is replaced nor its numpy, and GE still finds CANN's Python in PYTHONPATH."""
    (clone.module.VENV / "pyvenv.cfg").write_text("include-system-site-packages = true")
    assert clone.run(*line.split(), PYTHONPATH="of-cann")[0] == 7
    assert clone.calls.read_text().splitlines()[0] == "-m pip install --quiet --editable .[device]"
    assert clone.run(*line.split())[2] == ""
    assert clone.module.environment().get("PYTHONPATH") == os.environ.get("PYTHONPATH")


def test_an_environment_stands_on_a_python_with_torch_npu(
    clone: Clone, npu_machine: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[str, ...]] = []
    shutil.rmtree(clone.module.VENV)
    monkeypatch.setattr(clone.module, "run", lambda lock, *command: made.append(command))
    monkeypatch.setattr(clone.module.sys, "prefix", sys.base_prefix)
    monkeypatch.setenv("ASCEND_HOME_PATH", npu_machine["ASCEND_HOME_PATH"])
    monkeypatch.syspath_prepend(npu_machine["PYTHONPATH"])
    monkeypatch.delitem(sys.modules, "torch_npu", raising=False)  # hidden from the tests
    assert clone.module.needed(["build"]) == clone.module.needed(["check", "B", "--teacher", "demo"]) == {"device"}
    clone.module.new_environment(None)
    assert made[0][1:] == ("-m", "venv", str(clone.module.VENV), "--system-site-packages")
    monkeypatch.setattr(clone.module.sys, "prefix", "/an/environment")
    with pytest.raises(SystemExit, match=r"in an environment: .* -m pip install '\.\[device\]', then draftwood"):
        clone.module.new_environment(None)


def test_what_is_no_flag_brings_nothing(clone: Clone) -> None:
    clone.run("run", "BUNDLE", "--prompt", "take --engine qnn", "--engine", "cpu")
    assert clone.installs() == ["--editable ."]
    assert clone.module.needed(["inspect", "full:3x2"]) == set()
    assert clone.module.needed(["calibrate", "demo", "--workers", "4"]) == {"build"}


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


def test_a_clone_that_moved_is_installed_again(clone: Clone) -> None:
    clone.run("doctor")
    moved = clone.folder.rename(clone.folder.with_name("moved"))
    assert not load(moved / "draft").ready(set())


def test_an_environment_whose_making_was_stopped_is_made_anew(clone: Clone, monkeypatch: pytest.MonkeyPatch) -> None:
    clone.module.STAMP.unlink()
    monkeypatch.setattr(clone.module, "run", lambda lock, *command: clone.site.mkdir(parents=True, exist_ok=True))
    clone.module.prepare(set(), "doctor")
    assert not clone.module.PYTHON.exists(), "the old one is gone"


def test_a_killed_installation_is_not_believed_and_its_pip_is_waited_for(clone: Clone) -> None:
    clone.pip.write_text(f"touch {clone.folder}/begun; while [ ! -e {clone.folder}/go ]; do sleep 0.05; done")
    first = clone.start("doctor")
    until((clone.folder / "begun").exists)
    first.send_signal(signal.SIGKILL)
    first.communicate(timeout=WAIT)
    second = clone.start("doctor")
    assert second.stderr is not None
    assert second.stderr.readline() == "draft: another ./draft prepares the environment; waiting for it\n"
    assert len(clone.installs()) == 1
    (clone.folder / "go").touch()
    second.communicate(timeout=WAIT)
    assert second.returncode == 7 and clone.installs() == ["--editable ."]


def test_a_second_process_uses_what_the_first_made(clone: Clone) -> None:
    clone.pip.write_text(f"touch {clone.folder}/begun; while [ ! -e {clone.folder}/go ]; do sleep 0.05; done")
    first = clone.start("doctor")
    until((clone.folder / "begun").exists)
    second = clone.start("doctor")
    assert second.stderr is not None and "waiting" in second.stderr.readline()
    (clone.folder / "go").touch()
    for process in (first, second):
        process.communicate(timeout=WAIT)
        assert process.returncode == 7
    assert len(clone.installs()) == 1


def test_torch_npu_without_cann_breaks_neither_torch_nor_transformers() -> None:
    if not (Path(sys.prefix) / "draft.json").exists():
        pytest.skip("not an environment that ./draft has made")
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", AUTOLOAD)}
    code = "import torch; from transformers import LlamaForCausalLM"
    subprocess.run([sys.executable, "-P", "-c", code], env=variables, check=True)


def test_half_installed_packages_go(clone: Clone) -> None:
    for name in ("whole-1.dist-info", "half-1.dist-info", "~old", "~old-1.dist-info"):
        (clone.site / name).mkdir()
    (clone.site / "~old-1.dist-info" / "RECORD").touch()
    unpacked = clone.module.STATE / "pip-unpack-1"
    unpacked.mkdir()
    (clone.site / "whole-1.dist-info" / "RECORD").touch()
    clone.run("doctor")
    assert [path.name for path in clone.site.iterdir()] == ["whole-1.dist-info"] and not unpacked.exists()


@pytest.mark.parametrize(
    ("output", "said"),
    [
        (
            "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device",
            "is full; make room",
        ),
        ("ERROR: Could not install packages due to an OSError: [Errno 13] Permission denied: x", "cannot be written"),
        ("WARNING: Retrying ... NewConnectionError(...): [Errno 111] Connection refused", "no network"),
        ("WARNING: Retrying ... NameResolutionError: Temporary failure in name resolution", "no network"),
        ("WARNING: Retrying ... SSLError(SSLCertVerificationError(1, '[SSL: CERTIFICATE_VERIFY_FAILED]", "PIP_CERT"),
        ("x\nERROR: No matching distribution found for torch==2.13.0\ny", "No matching distribution found for torch"),
        (
            "WARNING: Retrying ... NewConnectionError(...)\nERROR: ... torch (from versions: 2.9.0)\nERROR: No torch",
            "installing failed (1): ERROR: No torch",
        ),
        ("WARNING: Retrying ... NewConnectionError(...)\nERROR: ... torch (from versions: none)", "no network"),
        ("", "installing failed (1)"),
    ],
    ids=["space", "access", "refused", "name", "certificate", "other", "one of two indexes", "none of two", "nothing"],
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
    [(errno.ENOSPC, " is full; make room"), (errno.EACCES, "cannot be written"), (errno.EROFS, "cannot be written")],
    ids=["space", "access", "read-only"],
)
def test_what_the_file_system_refuses_is_one_line(
    clone: Clone, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int, said: str
) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(number, os.strerror(number), "x")

    monkeypatch.setattr(clone.module.Path, "mkdir", refuse)
    assert clone.module.main(["doctor"]) == 2
    line = capsys.readouterr().err
    assert line.startswith("draft: error: ") and said in line and line.count("\n") == 1


def test_an_environment_of_another_python_counts_as_none(clone: Clone) -> None:
    """A system's new release of Python takes the place of the one that the environment's link leads to."""
    assert clone.module.stamp()
    newer = clone.folder / "python3.99"
    clone.module.PYTHON.rename(newer)
    clone.module.PYTHON.symlink_to(newer)
    assert clone.module.stamp() == {}
    (clone.module.VENV / "lib" / "python3.99").mkdir()
    assert clone.module.stamp()


def test_a_python_without_venv_names_the_package(clone: Clone, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clone.module, "find_spec", lambda name: None if name == "ensurepip" else object())
    with pytest.raises(SystemExit, match=r"apt install python3\.\d+-venv"):
        clone.module.new_environment(None)


def test_a_python_that_is_too_old_takes_a_newer_one_or_says_so(
    clone: Clone, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: list[list[str]] = []
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["draft", "demo"])
    monkeypatch.setattr(clone.module.os, "execv", lambda path, words: started.append(words))
    monkeypatch.setattr(clone.module.sys, "version_info", (3, 8, 0))
    with pytest.raises(SystemExit, match=r"Python 3\.11 or later is needed, .* no newer one is on the path"):
        clone.module.take_a_newer_python()
    assert started == []
    (tmp_path / "python3.12").touch(0o755)
    with pytest.raises(SystemExit):  # the stand-in for execv comes back
        clone.module.take_a_newer_python()
    assert started == [[str(tmp_path / "python3.12"), str(clone.folder / "draft"), "demo"]]


def test_torch_comes_from_its_index_for_cpus(clone: Clone) -> None:
    clone.run("demo")
    (line,) = (line for line in clone.calls.read_text().splitlines() if "--no-deps" in line)
    assert line.endswith(
        "--no-deps torch==2.13.0 --extra-index-url https://download.pytorch.org/whl/cpu --timeout 10 --retries 1"
    )


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
