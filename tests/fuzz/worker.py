"""A worker: forks a process for every case, watches over it, and reports the outcome.

The worker imports everything once and starts no thread, so a fork costs milliseconds and the case begins warm.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import random
import resource
import selectors
import shutil
import signal
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

from draftwood.environment import hide_torch_npu

hide_torch_npu()

from draftwood.errors import UserError  # noqa: E402
from draftwood.tests.fuzz.subjects import CANARY, Subject, of_case  # noqa: E402
from draftwood.tests.fuzz.targets import Wrong  # noqa: E402

# A case that waits uses no time of a processor, and one that computes may wait for one: hence two limits.
WALL_SECONDS, CPU_SECONDS = 30, 12
# Besides the memory that the worker has mapped already.
MEMORY = 2 << 30
FILE_SIZE = 64 << 20

# In the order in which a report shows them; the first two are right.
OUTCOMES = ("refused", "ran", "traceback", "hang", "abort", "wrong", "executed")


@dataclass(frozen=True, slots=True)
class Outcome:
    """A case's outcome: ``what`` is one of `OUTCOMES`, ``mutation`` the mutation, ``says`` the result."""

    subject: str
    seed: int
    number: int
    what: str
    mutation: str
    says: str

    @property
    def good(self) -> bool:
        return self.what in OUTCOMES[:2]

    @property
    def known_by(self) -> str:
        """The outcome, and the flags that repeat it."""
        return f"{self.what}: --only {self.subject} --seed {self.seed} --case {self.number}"


def case(seeds: Path, only: tuple[str, ...], seed: int, keep: Path | None, until: float, number: int) -> Outcome | None:
    """Runs the case of a number; None if ``until``, a time of the monotonic clock, has passed."""
    return None if time.monotonic() > until else run_case(seeds, of_case(number, only), seed, number, keep)


def run_case(seeds: Path, subject: Subject, seed: int, number: int, keep: Path | None = None) -> Outcome:
    """Mutates and reads in a forked process, within limits; ``keep`` gets the folder of a bad case."""
    with tempfile.TemporaryDirectory(prefix="draftwood-fuzz-", ignore_cleanup_errors=True) as name:
        place = Path(name)
        found = _forked(seeds, subject, seed, number, place)
        if (place / CANARY).exists():
            found = ["executed", *found[1:]]
        outcome = Outcome(subject.name, seed, number, *found)
        if keep is not None and not outcome.good:
            _keep(place, keep / f"{subject.name}-{seed}-{number}", outcome)
        return outcome


def _keep(place: Path, target: Path, outcome: Outcome) -> None:
    with contextlib.suppress(OSError, shutil.Error):  # special files do not copy
        shutil.copytree(place, target, symlinks=True, dirs_exist_ok=True, ignore=lambda at, names: _special(at, names))
    target.mkdir(parents=True, exist_ok=True)
    (target / "outcome.json").write_text(json.dumps(asdict(outcome), indent=1))


def _special(at: str, names: list[str]) -> list[str]:
    return [name for name in names if not ((path := Path(at, name)).is_symlink() or path.is_dir() or path.is_file())]


def _forked(seeds: Path, subject: Subject, seed: int, number: int, place: Path) -> list[str]:
    """[what, mutation, says] of a case."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _case(seeds, subject, seed, number, place, writing)
        os._exit(0)
    os.close(writing)
    said, ended = _listen(reading, child)
    _, status = os.waitpid(child, 0)
    lines = said.decode(errors="replace").splitlines()
    mutation = json.loads(lines[0]) if lines else "none"
    if not ended or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU):
        return ["hang", mutation, "no end within the time limit"]
    if os.WIFSIGNALED(status):
        return ["abort", mutation, f"signal {os.WTERMSIG(status)}; {_tail(place / 'stderr')}"]
    if len(lines) < 2:
        return ["abort", mutation, f"exit {os.WEXITSTATUS(status)} without a word; {_tail(place / 'stderr')}"]
    return [json.loads(lines[1])[0], mutation, json.loads(lines[1])[1]]


def _listen(reading: int, child: int) -> tuple[bytes, bool]:
    """The case's output until it closes its end, and whether it did so within the time limit."""
    said, until = b"", time.monotonic() + WALL_SECONDS
    with selectors.DefaultSelector() as selector, os.fdopen(reading, "rb", buffering=0) as pipe:
        selector.register(pipe, selectors.EVENT_READ)
        while (left := until - time.monotonic()) > 0:
            if selector.select(left):
                piece = pipe.read(1 << 16)
                if not piece:
                    return said, True
                said += piece
    os.kill(child, signal.SIGKILL)
    return said, False


def _case(seeds: Path, subject: Subject, seed: int, number: int, place: Path, writing: int) -> None:
    """The forked process: it leaves by its end, by a signal, or by a limit."""
    rng = random.Random(f"{subject.name} {seed} {number}")
    folder = place / "case"
    try:
        _link_seeds(seeds, subject, rng, place)
        mutation = subject.mutate(folder, rng)
    except BaseException:
        mutation = f"the mutation failed: {traceback.format_exc()}"
    os.write(writing, json.dumps(mutation).encode() + b"\n")
    _limit(place)
    os.write(writing, json.dumps(_verdict(subject, folder, rng)).encode() + b"\n")


def _link_seeds(seeds: Path, subject: Subject, rng: random.Random, place: Path) -> None:
    """Hard links to the seed, and the other files that a target needs."""
    shutil.copytree(seeds / rng.choice(subject.seeds), place / "case", copy_function=os.link)
    (place / "teacher").symlink_to(seeds / "teacher")
    (place / "bundle").symlink_to(seeds / "bundles" / "medusa")


def _limit(place: Path) -> None:
    faulthandler.disable()  # a test's own, which would report an abort that is wanted
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY, mapped + MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 2))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_SIZE, FILE_SIZE))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    os.environ["XDG_CACHE_HOME"] = str(place / "cache")
    nothing, errors = os.open(os.devnull, os.O_RDWR), os.open(place / "stderr", os.O_WRONLY | os.O_CREAT, 0o600)
    for descriptor, stands_for in ((nothing, 0), (nothing, 1), (errors, 2)):
        os.dup2(descriptor, stands_for)


def _verdict(subject: Subject, folder: Path, rng: random.Random) -> tuple[str, str]:
    try:
        return "ran", subject.target(folder, rng)
    except UserError as error:
        line = str(error)
        return ("refused", line) if line and line.isprintable() else ("traceback", f"more than a line: {line!r}")
    except Wrong as error:
        return "wrong", str(error)
    except BaseException as error:
        where = traceback.extract_tb(error.__traceback__)
        ours = [f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in where if "draftwood" in f.filename]
        return "traceback", f"{type(error).__name__}: {str(error)[:200]} at {' < '.join(ours[::-1][:4])}"


def _tail(path: Path) -> str:
    text = path.read_text(errors="replace") if path.exists() else ""
    return " ".join(text.split())[-300:]
