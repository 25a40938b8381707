"""The command ``draftwood``: finds the subcommand's module, and turns errors into exit codes.

A subcommand is a module with ``add_arguments(parser)`` and ``main(args) -> int``. It is imported only when it is asked
for, so ``draftwood --help`` and ``draftwood doctor`` are quick and need only the base installation.

Exit codes: 0 done, 1 the command says no, 2 the input cannot be used, 129 terminal closed, 130 interrupted, 141 output
closed, 143 ended by SIGTERM.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib
import io
import os
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from fcntl import F_GETFL, fcntl
from types import ModuleType
from typing import Any, NamedTuple, TextIO

from draftwood.environment import AUTOLOAD
from draftwood.errors import UserError
from draftwood.tools.signals import end_on_signals
from draftwood.version import __version__

# What the machine refuses, whatever the command: no fault of ours, so one line. The last four are of paths: a file
# stands where a folder should, links form a circle, or a name is too long.
_MACHINE = {
    errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.EFBIG, errno.EMFILE,
    errno.EEXIST, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG,
}  # fmt: skip

# Likeness from which an unknown command or flag counts as a known one that is misspelled.
_NEAR = 0.7

# Each a module of tools/commands.
COMMANDS = {
    "demo": "build a bundle of SmolLM2, then ask it twelve questions with and without speculation",
    "make": "turn a checkpoint into the bundle that suits this machine: count, time, plan, build, check, tune, compare",
    "build": "freeze a checkpoint and its draft trees into a bundle",
    "quantize": "round a teacher to int8 weights and activations (W8A8), and say how much it differs",
    "bind": "add the weights of a checkpoint to an NPU bundle that was built without them",
    "check": "compare every graph of a bundle with eager PyTorch",
    "run": "answer one prompt with a bundle",
    "chat": "talk with a bundle in the terminal",
    "serve": "serve bundles with OpenAI's API over HTTP, and a page that shows each step",
    "deploy": "serve with engines on Ray: several of a bundle, on this machine or on a cluster",
    "bench": "compare speculative with plain decoding: tokens and speed",
    "calibrate": "count the rank paths that a teacher's text takes through a drafter's candidates",
    "profile": "measure, or model for another device, how long steps take",
    "tune": "measure every gear of a bundle on this machine, for the policy to choose by",
    "plan": "choose draft trees and gears from statistics and a latency table",
    "distill": "let a teacher write the texts that its drafter learns from",
    "train": "train a drafter for a frozen teacher on the teacher's own texts",
    "export": "write a drafter in the layout that another engine serves",
    "inspect": "show a draft tree, a bundle or a checkpoint",
    "doctor": "say what this machine can do and what is missing",
}


class Program(NamedTuple):
    """A command line: its name, its summary, the package that its commands are modules of, and a line for each."""

    name: str
    summary: str
    package: str
    commands: Mapping[str, str]


SUMMARY = "Draft trees planned offline, frozen into static graphs, chosen per step by a thin runtime."
DRAFTWOOD = Program("draftwood", SUMMARY, "draftwood.tools.commands", COMMANDS)


def main(argv: Sequence[str] | None = None, program: Program = DRAFTWOOD) -> int:
    """Runs one command and returns its exit code; never raises for what a user can get wrong."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if argv is None:  # a process of the command's own
        end_on_signals()
    if not _takes(sys.stderr):  # the answer and the exit code tell enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # or the next file that is opened would take its number
        sys.stderr = os.fdopen(2, "w", closefd=False)
    if not _takes(sys.stdout):
        return _refuse("output: closed, or open for reading alone; give it a place, /dev/null if nobody reads it")
    if isinstance(sys.stdout, io.TextIOWrapper):  # a file may hold what no terminal can spell, as half a character
        sys.stdout.reconfigure(errors="backslashreplace")
    if argv is None:
        warnings.formatwarning = _warned
    # No option before the command takes a value, so the first other word is the command.
    command = next((word for word in arguments if not word.startswith("-")), "")
    try:
        code = _run(program, command, arguments)
        sys.stdout.flush()  # here, where a closed pipe is still handled
        return code
    except SystemExit as stop:  # argparse has printed its help, or usage and error
        return stop.code if isinstance(stop.code, int) else 0
    except UserError as error:
        return _refuse(str(error))
    except ModuleNotFoundError as error:
        return _refuse(_missing(command, error))
    except RuntimeError as error:
        if AUTOLOAD not in str(error):
            raise
        return _refuse(_unfit(error))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        _silence(sys.stdout)
        return 141
    except MemoryError:
        return _refuse(f"{command}: not enough memory; free some, or give the command less at a time")
    except OSError as error:
        if error.errno not in _MACHINE:
            raise
        if error.filename is None:
            _silence(sys.stdout)  # what could not be written would be tried once more at the end
        return _refuse(f"{error.filename or 'output'}: {error.strerror}")
    finally:
        try:
            sys.stderr.flush()
        except OSError:  # a full disk, say
            _silence(sys.stderr)


def _takes(stream: TextIO | None) -> bool:
    """Whether a stream can be written to: it may be closed, or, under a shell's script, open for reading alone."""
    try:
        return stream is not None and fcntl(stream.fileno(), F_GETFL) & os.O_ACCMODE != os.O_RDONLY
    except io.UnsupportedOperation:  # replaced by something without a descriptor
        return True
    except OSError:
        return False


_formatted = warnings.formatwarning


def _warned(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """A warning of ours is one line; others keep their place."""
    if category.__module__.startswith("draftwood."):
        return f"draftwood: warning: {message}\n"
    return _formatted(message, category, filename, lineno, line)


def _run(program: Program, command: str, arguments: list[str]) -> int:
    if command not in program.commands:  # the parser itself answers: help, version, or usage and error
        _parse(program, command, None, arguments)
        return 2
    module = importlib.import_module(f"{program.package}.{command}")
    code: int = module.main(_parse(program, command, module, arguments))
    return code


def _parse(program: Program, command: str, module: ModuleType | None, arguments: list[str]) -> argparse.Namespace:
    # No abbreviations: a later flag must not change what a script means today.
    parser = argparse.ArgumentParser(prog=program.name, description=program.summary, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"draftwood {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=_CommandParser)
    for name, line in program.commands.items():
        description = f"{line[0].upper()}{line[1:]}."
        subparser = commands.add_parser(name, help=line, description=description, allow_abbrev=False)
        if module is not None and name == command:
            subparser.register("action", None, _GivenOnce)
            module.add_arguments(subparser)
    if command not in commands.choices and (near := _near(command, commands.choices)):
        parser.error(f"no command {command}{near}")
    return parser.parse_args(arguments)


class _CommandParser(argparse.ArgumentParser):
    """Refuses unknown words itself, with its command's usage; argparse leaves that to the program's parser."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            near = "".join(_near(word.partition("=")[0], self._option_string_actions) for word in unknown)
            self.error(f"unrecognized arguments: {' '.join(unknown)}{near}")
        return parsed, unknown

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        """Refuses an empty value, as of a shell's variable that is not set, before its type makes something of it:
        the path of nothing is the current folder."""
        if "" in arg_strings:
            more = ", or leave the flag out" if action.option_strings else ""
            raise argparse.ArgumentError(action, f"its value is empty; give one{more}")
        return super()._get_values(action, arg_strings)


def _near(word: str, known: Iterable[str]) -> str:
    """A question for the known name that a misspelled one is like; empty if it is like none."""
    from difflib import get_close_matches

    near = get_close_matches(word, known, 1, _NEAR)
    return f"; did you mean {near[0]}?" if near else ""


class _GivenOnce(argparse.Action):
    """Takes a value, as argparse's own action does, but not a second one: the first would be lost without a word."""

    _first: object = None

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: object, option: str | None = None
    ) -> None:
        if self._first is not None and option:
            joined = f"; expected one list: {option} {self._first},{values}" if "[," in str(self.metavar) else ""
            raise argparse.ArgumentError(self, f"given twice, as {self._first} and as {values}{joined}")
        self._first = values
        setattr(namespace, self.dest, values)


def _missing(command: str, error: ModuleNotFoundError) -> str:
    from draftwood.tools.packages import EXTRAS, install  # what looks packages up takes long to import

    package = (error.name or "").partition(".")[0]
    if package not in EXTRAS:
        raise error  # not an optional package but a fault of ours
    return f"{command} needs {package}, which is not installed: {install(package)}"


def _unfit(error: RuntimeError) -> str:
    """Torch's error if it cannot load torch_npu, of one line."""
    cause = str(error.__cause__ or error).strip().partition("\n")[0]
    return (
        f"torch_npu does not load with the CANN at hand ({cause}); install releases that fit each other (docs/npu.md),"
        f" or, to do without the NPU, export {AUTOLOAD}=0"
    )


def _refuse(message: str) -> int:
    with contextlib.suppress(OSError):  # on a full disk, say
        print("draftwood: error:", message, file=sys.stderr)
    return 2


def _silence(stream: TextIO) -> None:
    """Sends what is left in the buffer nowhere, or Python would complain about it on exit."""
    with contextlib.suppress(OSError, ValueError):  # a replaced stream may have no descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


if __name__ == "__main__":
    sys.exit(main())
