"""Command lines that are run one after the other, each for one output; existing outputs are kept.

``stages.json`` notes each stage's inputs before it begins. So an output that appeared in the last moment of a stopped
run is known, and one whose inputs have changed is made again.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftwood.errors import UserError
from draftwood.files import write_whole
from draftwood.tools.made_from import MadeFrom, changed, damaged, read_note

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
    # Whether its output is there only once it is whole, as a bundle is.
    whole: bool = False
    # Its refusal in one line, judged by its output; nothing is run after that. None if it may go on.
    refuses: Callable[[Path], str] | None = None

    @property
    def line(self) -> str:
        """As one would type it."""
        return shlex.join(("draftwood", *self.words))


class Kept:
    """The outputs of some stages, as their folder notes them."""

    def __init__(self, stages: Sequence[Stage], work: Path, given: MadeFrom) -> None:
        self.stages, self.work, self.given = stages, work, given
        self._notes: list[dict[str, Any]] = _notes(work / _KEPT)
        self.changed = changed(self._notes[0].get("from"), given) if self._notes else None
        # How many stages, from the first on, are there as they would be made now.
        self.done = 0 if self.changed else self._count()

    def note(self, number: int, done: bool) -> None:
        """Notes that the stages before this one are done, and whether it is."""
        marks = [
            {"line": stage.line, "makes": str(stage.makes), "done": done or place < number, "from": self.given}
            for place, stage in enumerate(self.stages[: number + 1])
        ]
        write_whole(self.work / _KEPT, json.dumps(marks).encode())

    def _count(self) -> int:
        done = 0
        for stage, note in zip(self.stages, self._notes, strict=False):
            same = note.get("line") == stage.line and note.get("makes") == str(stage.makes) and stage.makes.exists()
            if not same or not (note.get("done") or stage.whole):
                break
            done += 1
        return done


def run(stages: Sequence[Stage], work: Path, given: MadeFrom) -> None:
    """Runs the stages that are not there; names the changes if some were.

    Raises:
        StageError: one failed, or refuses what was made.
        RequestError: the note of what is there is damaged.
    """
    notes = Kept(stages, work, given)
    if notes.changed:
        print(f"made again from the first stage on: {notes.changed}", file=sys.stderr, flush=True)
    for number, stage in enumerate(stages):
        if number >= notes.done:
            _remove(stage.makes)
            notes.note(number, done=False)
            _run(stage, number + 1, len(stages), work)
            notes.note(number, done=True)
        if stage.refuses and (refusal := stage.refuses(stage.makes)):
            raise StageError(refusal)


def ours(work: Path, path: Path) -> bool:
    """Whether a stage that ``work`` notes made this, from any inputs."""
    return any(note.get("makes") == str(path) for note in _notes(work / _KEPT))


def _notes(path: Path) -> list[dict[str, Any]]:
    notes = read_note(path, list)
    if not all(isinstance(note, dict) for note in notes):
        raise damaged(path, "no list of stages")
    return notes


def _run(stage: Stage, number: int, count: int, work: Path) -> None:
    """Runs a stage in its own process, which gives its memory back; standard output becomes its file of figures.

    Raises:
        StageError: it failed.
    """
    place = f"[{number}/{count}] " if count > 1 else ""
    print(f"{place}{stage.name}: {stage.why}\n    {stage.line}", file=sys.stderr, flush=True)
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
