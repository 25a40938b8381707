"""Command lines that are run one after the other, each for one output; what is there already is kept."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftwood.errors import UserError

_KEPT = "stages.json"


class StageError(UserError):
    """A stage has failed; its own output says why."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One command line. ``makes`` is the file or folder that is there once it is done; its figures are kept."""

    name: str
    words: tuple[str, ...]
    makes: Path
    why: str
    # Whether it says no in its output, which somebody reads.
    judges: bool = False

    @property
    def line(self) -> str:
        """As one would type it."""
        return shlex.join(("draftwood", *self.words))


def kept(stages: Sequence[Stage], work: Path, given: Sequence[str]) -> int:
    """How many stages, from the first on, are there as they would be made now; ``given`` is what all of them read."""
    try:
        before = json.loads((work / _KEPT).read_text())
    except (OSError, ValueError):
        before = []
    now = _marks(stages, given)
    done = 0
    while done < min(len(before), len(now)) and before[done] == now[done] and stages[done].makes.exists():
        done += 1
    return done


def keep(stages: Sequence[Stage], work: Path, given: Sequence[str]) -> None:
    """Notes that these are done."""
    (work / _KEPT).write_text(json.dumps(_marks(stages, given)))


def run(stages: Sequence[Stage], work: Path, given: Sequence[str]) -> None:
    """Runs those that are not there, and notes each.

    Raises:
        StageError: one failed.
    """
    for number in range(kept(stages, work, given), len(stages)):
        _run(stages[number], number + 1, len(stages), work)
        keep(stages[: number + 1], work, given)


def _marks(stages: Sequence[Stage], given: Sequence[str]) -> list[list[Any]]:
    """What decides a stage's output."""
    return [[stage.line, list(given)] for stage in stages]


def _run(stage: Stage, number: int, count: int, work: Path) -> None:
    """Runs a stage in a process of its own, which gives its memory back; standard output becomes its file of figures.

    Raises:
        StageError: it failed.
    """
    print(f"[{number}/{count}] {stage.name}: {stage.why}\n    {stage.line}", file=sys.stderr, flush=True)
    _remove(stage.makes)
    began, printed = time.monotonic(), work / f"{number}.out"
    with printed.open("wb") as out:
        code = subprocess.call([sys.executable, "-P", "-m", "draftwood.tools.cli", *stage.words], stdout=out)
    said_no = stage.judges and code == 1 and (stage.makes.exists() or printed.stat().st_size)
    if code and not said_no:
        raise StageError(f"{stage.name} failed ({code}): {stage.line}; mend what it says, and run make again to go on")
    if stage.makes.exists():
        printed.unlink()
    else:
        printed.rename(stage.makes)
    print(f"    {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
