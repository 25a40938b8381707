"""The command line: lazy, quiet about a user's errors, and exact in its exit codes."""

import argparse
import errno
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

import draftwood
from draftwood.errors import InvariantError, TreeError
from draftwood.tools import cli

# Every flag of every command. A new one is a decision: `./draft python tests/tools/test_cli.py` writes the table anew.
FLAGS = Path(__file__).with_name("flags.json")


def flags() -> dict[str, list[str]]:
    """The flags of every command, each once by its first name; of ``deploy`` those that ``serve`` has not."""
    found = {}
    for name in cli.COMMANDS:
        parser = argparse.ArgumentParser(add_help=False)
        import_module(f"draftwood.tools.commands.{name}").add_arguments(parser)
        found[name] = list(dict.fromkeys(flags_of(parser)))
    found["deploy"] = [flag for flag in found["deploy"] if flag not in found["serve"]]
    return found


def flags_of(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from flags_of(inner)
        elif action.option_strings and "--help" not in action.option_strings:
            yield action.option_strings[0]


def command(monkeypatch: pytest.MonkeyPatch, main: Callable[[argparse.Namespace], int]) -> int:
    """The exit code of a command `fake` that does `main`."""
    module = SimpleNamespace(add_arguments=lambda parser: None, main=main)
    monkeypatch.setitem(sys.modules, "draftwood.tools.commands.fake", module)
    monkeypatch.setitem(cli.COMMANDS, "fake", "a command of the test")
    return cli.main(["fake"])


def failing(error: BaseException) -> Callable[[argparse.Namespace], int]:
    def main(args: argparse.Namespace) -> int:
        raise error

    return main


def test_the_flags_are_those_of_the_table() -> None:
    assert flags() == json.loads(FLAGS.read_text())


def test_the_flags_are_few() -> None:
    assert sum(map(len, json.loads(FLAGS.read_text()).values())) <= 110


def test_help_lists_every_command_and_imports_none(python: Callable[..., str]) -> None:
    code = """
import sys
from draftwood.tools.cli import main
assert main(["--help"]) == 0
print({"numpy", "torch", "msgspec", "onnxruntime", "draftwood.tools.commands.build"} & set(sys.modules))
"""
    lines = python(code).splitlines()
    assert lines[-1] == "set()"
    for name in cli.COMMANDS:
        assert any(line.split()[:1] == [name] for line in lines), name


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"draftwood {draftwood.__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    [[], ["nope"], ["inspect"], ["inspect", "plain", "--nope"], ["inspect", "plain", "--js"]],
    ids=["nothing", "unknown command", "missing argument", "unknown flag", "abbreviated flag"],
)
def test_wrong_arguments_end_in_usage_and_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith("usage: draftwood")
    assert ": error: " in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "usage", "said"),
    [
        (["biuld", "demo"], "draftwood [-h]", "no command biuld; did you mean build?"),
        (["inspect", "plain", "--jsno"], "draftwood inspect", "unrecognized arguments: --jsno; did you mean --json?"),
        (["inspect", "plain", "--npus=1"], "draftwood inspect", "--npus=1; did you mean --npu?"),
        (["inspect", "plain", "--colour", "red"], "draftwood inspect", "unrecognized arguments: --colour red"),
    ],
)
def test_a_misspelled_word_is_named_with_the_one_it_is_like(
    arguments: list[str], usage: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"usage: {usage}") and err.rstrip().endswith(said)


@pytest.mark.parametrize(
    ("flag", "values", "said"),
    [
        ("--tree", ("chain:1", "chain:3"), "as chain:1 and as chain:3; expected one list: --tree chain:1,chain:3"),
        ("--out", ("one", "two"), "as one and as two"),
    ],
)
def test_an_option_given_twice_is_refused(
    flag: str, values: tuple[str, str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = values
    assert cli.main(["build", "demo", flag, first, flag, second]) == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith(f"error: argument {flag}: given twice, {said}")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["profile", "demo", "--batch-size", "", "--out", "table"], "--batch-size: its value is empty; give one, or"),
        (["distill", "demo", "--out", ""], "--out: its value is empty; give one, or"),  # not the current folder
        (["distill", "demo", "--data", "one", "", "--out", "texts"], "--data: its value is empty; give one, or"),
        (["check", ""], "BUNDLE: its value is empty; give one"),
    ],
)
def test_an_empty_value_is_refused(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 2
    assert f"argument {said}" in capsys.readouterr().err.splitlines()[-1]


def test_a_command_decides_its_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    assert command(monkeypatch, lambda args: 1) == 1


def test_user_errors_are_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(monkeypatch, failing(TreeError("node 3:\nno parent"))) == 2
    assert capsys.readouterr().err == "draftwood: error: node 3:\\nno parent\n"


def test_a_missing_package_names_its_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = ModuleNotFoundError("No module named 'torch.nn'", name="torch.nn")
    assert command(monkeypatch, failing(missing)) == 2
    expected = "fake needs torch, which is not installed: pip install 'draftwood[build]'"
    assert capsys.readouterr().err == f"draftwood: error: {expected}\n"


def test_a_torch_npu_that_does_not_load_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As torch raises it while it is imported next to half a CANN, or one of another release."""
    error = RuntimeError("Failed to load the backend extension: torch_npu. You can disable extension auto-loading with"
                         " TORCH_DEVICE_BACKEND_AUTOLOAD=0.")  # fmt: skip
    error.__cause__ = ImportError("libtorch_npu.so: undefined symbol: aclrtX\nmore")
    assert command(monkeypatch, failing(error)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "undefined symbol: aclrtX)" in line and line.endswith("export TORCH_DEVICE_BACKEND_AUTOLOAD=0")


@pytest.mark.parametrize(
    "error",
    [
        InvariantError("a promise"),
        ModuleNotFoundError("No module", name="draftwood.nope"),
        KeyError("x"),
        RuntimeError("x"),
    ],
    ids=["broken promise", "module of ours", "bug", "bug of a library"],
)
def test_our_own_faults_keep_their_traceback(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(type(error)):
        command(monkeypatch, failing(error))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_terminated(number: signal.Signals, tmp_path: Path) -> None:
    code = f"""
import signal, sys
from draftwood.tools import cli

def run(program, command, arguments):
    try:
        signal.raise_signal({int(number)})
    finally:
        print("ended")

cli._run = run
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup, under which the tests may run, has it ignored
sys.exit(cli.main())
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (128 + number, "ended\n", "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_compiled_module_is_loaded_before_the_command_ends(number: signal.Signals, tmp_path: Path) -> None:
    """numpy's imports datetime while it sets itself up; interrupted there, it raises an ImportError."""
    code = f"""
import os, signal, sys
from draftwood.tools import cli

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "datetime":
            print(name)
            os.kill(os.getpid(), {int(number)})

def run(program, command, arguments):
    sys.meta_path.insert(0, Finder())
    import numpy
    while True:
        signal.pause()

cli._run = run
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that runs the tests in its background ignores it
sys.exit(cli.main())
"""
    line = [sys.executable, "-c", code]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (128 + number, "datetime\n", "")


def test_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert command(monkeypatch, failing(KeyboardInterrupt())) == 130


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (MemoryError(), "fake: not enough memory; free some, or give the command less at a time"),
        (OSError(errno.ENOSPC, "No space left on device", "/full/report.json"), "/full/report.json: No space left"),
        (OSError(errno.ENOSPC, "No space left on device"), "output: No space left on device"),
        (PermissionError(errno.EROFS, "Read-only file system", "/x"), "/x: Read-only file system"),
    ],
)
def test_what_the_machine_refuses_is_one_line(
    error: Exception, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "_silence", lambda stream: None)
    assert command(monkeypatch, failing(error)) == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith(f"draftwood: error: {line}")


@pytest.mark.parametrize(
    ("output", "line"), [("> /dev/full", "No space left on device"), (">&-", "closed, "), ("1</dev/null", "closed, ")]
)
def test_output_that_cannot_be_written_is_one_line(output: str, line: str, tmp_path: Path) -> None:
    run = f"{sys.executable} -m draftwood.tools.cli inspect chain:200 {output}"
    done = subprocess.run(["sh", "-c", run], cwd=tmp_path, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    (told,) = done.stderr.splitlines()
    assert told.startswith(f"draftwood: error: output: {line}")


@pytest.mark.parametrize("errors", ["2>&-", "2</dev/null", "2>/dev/full"])
@pytest.mark.parametrize(("asked", "code"), [("inspect chain:3 --json", 0), ("inspect chain:nope", 2), ("nope", 2)])
def test_where_errors_cannot_be_told_the_exit_code_does(errors: str, asked: str, code: int, tmp_path: Path) -> None:
    """After a shell's script a closed descriptor may be one that is open for reading."""
    run = f"{sys.executable} -m draftwood.tools.cli {asked} {errors}"
    done = subprocess.run(["sh", "-c", run], cwd=tmp_path, stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == code
    assert bool(json.loads(done.stdout)) if code == 0 else not done.stdout


def test_half_a_character_is_spelled_out(tmp_path: Path) -> None:
    shown = (
        "import sys; from draftwood.tools import cli; cli._run = lambda *_: print('\\ud800'); sys.exit(cli.main([]))"
    )
    done = subprocess.run([sys.executable, "-c", shown], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("\\ud800\n", "")


def test_a_closed_pipe_is_no_error(tmp_path: Path) -> None:
    run = [sys.executable, "-m", "draftwood.tools.cli", "inspect", "chain:200"]
    with subprocess.Popen(run, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_building_without_torch(python: Callable[..., str]) -> None:
    code = """
import sys
from draftwood.tools.cli import main
sys.stderr = sys.stdout
print(main(["build", "m", "--out", "o"]))
"""
    expected = "build needs torch, which is not installed: pip install 'draftwood[build]'"
    assert python(code, blocked=["torch"]) == f"draftwood: error: {expected}\n2\n"


if __name__ == "__main__":
    FLAGS.write_text(json.dumps(flags(), indent=1) + "\n")
