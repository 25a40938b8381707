"""Calibration statistics: the rank paths that a teacher's text took, with what was known at each context.

A context is one position of the teacher's text. Beside its rank path it may have a length (tokens in front of
it), the drafter's confidence (the probability of its best first candidate) and the name of a task. Equal
contexts are counted together, so statistics of two runs merge by addition.

Contexts of one text resemble each other. Whole groups (texts) therefore go into one of 128 folds, by a hash of
their name alone; intervals take a fold as one observation, and what is held out stays held out in every merge.

Shape suffixes: N distinct contexts, D depth of the longest path.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray

from draftwood.errors import TreeError
from draftwood.trees._json import expect_format, load_json
from draftwood.trees.statistics import RANK_PATHS_FORMAT, RankPaths
from draftwood.trees.topology import rank_path

CALIBRATION_FORMAT = "draftwood.calibration"
FOLDS = 128
# Behind the end of a path, where a rank would stand.
END = 255
# Lengths are kept in steps of 64 tokens, rounded up; step 0 is a length that nobody knows.
LENGTH_STEP = 64
# Confidence is kept in 32 equal bins.
BINS = 32
UNKNOWN_BIN = 255

Part = Literal["counted", "tuning", "heldout"]
# Of 8 folds 6 are counted, 1 chooses the planner's settings and 1 only ever reports.
_PARTS: tuple[Part, ...] = ("counted", "counted", "counted", "tuning", "counted", "counted", "counted", "heldout")
_HEADER = {"contexts", "grouped", "sampled", "tasks", "sources", "rows", "ranks", "sha256"}


@dataclass(frozen=True, slots=True)
class Contexts:
    """Distinct contexts and how often each occurred, as columns.

    Args:
        ranks_ND: uint8[N, D], the rank path, `END` behind it.
        counts_N: int64[N], 1 or more.
        folds_N: uint8[N], below `FOLDS`.
        tasks_N: uint8[N], index into the names of tasks.
        bins_N: uint8[N], ``floor(confidence * BINS)`` or `UNKNOWN_BIN`.
        steps_N: uint16[N], length in steps of `LENGTH_STEP` tokens, rounded up; 0 where unknown.
    """

    ranks_ND: NDArray[np.uint8]
    counts_N: NDArray[np.int64]
    folds_N: NDArray[np.uint8]
    tasks_N: NDArray[np.uint8]
    bins_N: NDArray[np.uint8]
    steps_N: NDArray[np.uint16]

    @property
    def total(self) -> int:
        """Contexts, each as often as it occurred."""
        return int(self.counts_N.sum())

    @property
    def depth(self) -> int:
        """D: the most ranks that a path has here."""
        return self.ranks_ND.shape[1]

    @property
    def width(self) -> int:
        """The largest rank + 1, 0 if all paths are empty."""
        return int((self.ranks_ND + np.uint8(1)).max(initial=0))  # END + 1 wraps to 0

    def where(self, mask_N: NDArray[np.bool_]) -> Contexts:
        """The contexts with True in bool[N]."""
        return Contexts(*(getattr(self, field.name)[mask_N] for field in fields(self)))


class Calibration:
    """Contexts that add up, and a file of them.

    Args:
        sources: how far each source has been counted, by a name of the caller's choice; what makes a run
            resumable. A merge keeps the farther of two.

    Example:
        >>> calibration = Calibration()
        >>> calibration.add((0, 2), group="text 1", context=412, confidence=0.81)
        >>> calibration.add((), group="text 1")
        >>> calibration.contexts.total, Calibration.from_bytes(calibration.to_bytes()) == calibration
        (2, True)
    """

    def __init__(self) -> None:
        self.sources: dict[str, int] = {}
        self._grouped = self._sampled = 0
        self._tasks: tuple[str, ...] = ("",)
        self._contexts = _empty()
        self._new = _Columns()

    def __eq__(self, other: object) -> bool:
        return self.to_bytes() == other.to_bytes() if isinstance(other, Calibration) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # mutable

    @property
    def contexts(self) -> Contexts:
        """All contexts, distinct and sorted."""
        self._settle()
        return self._contexts

    @property
    def tasks(self) -> tuple[str, ...]:
        """Names of the tasks, sorted; the first is '' for contexts without one."""
        self._settle()
        return self._tasks

    @property
    def grouped(self) -> bool:
        """Whether every context came with the name of its text; otherwise intervals take lines as independent."""
        return self._grouped == self.contexts.total

    @property
    def sampled(self) -> int:
        """How many of the contexts are of sampled text; the rest are of greedy text, or nobody has said."""
        return self._sampled

    def part(self, part: Part) -> Contexts:
        """What trees are made from (counted), settings chosen on (tuning) or figures reported for (heldout)."""
        wanted = np.array([name == part for name in _PARTS])
        return self.contexts.where(wanted[self.contexts.folds_N % len(_PARTS)])

    def add(
        self,
        path: Sequence[int],
        *,
        group: str | int,
        context: int | None = None,
        confidence: float | None = None,
        task: str = "",
        sampled: bool = False,
    ) -> None:
        """Count one context.

        Args:
            path: its rank path, each rank below 255; empty if the truth was no candidate at all.
            group: the text it belongs to, or the number of a line that stands for itself alone.
            context: tokens in front of it, 0 or more.
            confidence: probability of the drafter's best first candidate, 0 to 1.
            sampled: whether the text was drawn at a temperature above 0.

        Raises:
            TreeError: one of these is something else.
        """
        ranks = _short(rank_path(path))
        self._new.append(ranks, _fold(group), task, _bin(confidence), _step(context))
        self._grouped += isinstance(group, str)
        self._sampled += sampled

    def merge(self, other: Calibration) -> None:
        """Add all contexts of `other`."""
        self._settle()
        other._settle()
        self._combine(other._tasks, other._contexts)
        self._grouped += other._grouped
        self._sampled += other._sampled
        for source, done in other.sources.items():
            self.sources[source] = max(self.sources.get(source, 0), done)

    def rank_paths(self) -> RankPaths:
        """The paths alone, for whoever needs no more."""
        result = RankPaths()
        for ranks, count in zip(self.contexts.ranks_ND.tolist(), self.contexts.counts_N.tolist(), strict=True):
            result.add([rank for rank in ranks if rank != END], count)
        return result

    def to_bytes(self) -> bytes:
        """The file: a line of JSON, then the columns; equal contents give equal bytes.

        Columns of N entries: path length u1, fold u1, task u1, confidence bin u1, length step u2, count u4;
        then all ranks, u1, one path behind the other. Little-endian.

        Raises:
            TreeError: a count that 32 bits do not hold.
        """
        contexts = self.contexts
        if contexts.counts_N.max(initial=0) >= 2**32:
            raise TreeError(f"calibration: a context counted {contexts.counts_N.max()} times; expected below 2^32")
        inside_ND = contexts.ranks_ND != END
        columns = [contexts.folds_N, contexts.tasks_N, contexts.bins_N]
        payload = b"".join(
            [
                inside_ND.sum(1, dtype=np.uint8).tobytes(),
                *(column.tobytes() for column in columns),
                contexts.steps_N.astype("<u2").tobytes(),
                contexts.counts_N.astype("<u4").tobytes(),
                contexts.ranks_ND[inside_ND].tobytes(),
            ]
        )
        header = {
            "format": CALIBRATION_FORMAT,
            "version": 1,
            "contexts": contexts.total,
            "grouped": self._grouped,
            "sampled": self._sampled,
            "tasks": self._tasks,
            "sources": dict(sorted(self.sources.items())),
            "rows": len(contexts.counts_N),
            "ranks": int(inside_ND.sum()),
            "sha256": hashlib.sha256(payload).hexdigest(),
        }
        return json.dumps(header, separators=(",", ":")).encode() + b"\n" + payload

    @classmethod
    def from_bytes(cls, data: bytes, where: str = "calibration") -> Self:
        """The statistics in `data`, as `to_bytes` writes them, or in the JSON of `RankPaths`.

        Of the latter everything is counted and nothing held out, for it names no texts.

        Raises:
            TreeError: it is neither, or damaged.
        """
        line, _, payload = data.partition(b"\n")
        try:
            header = load_json(line.decode(), where)
        except UnicodeDecodeError as error:
            raise TreeError(f"{where}: not calibration statistics: its first line is not text") from error
        if isinstance(header, dict) and header.get("format") == RANK_PATHS_FORMAT:
            return cls._from_rank_paths(RankPaths.from_json(line.decode(), where))
        fields = expect_format(header, CALIBRATION_FORMAT, _HEADER, where)
        if hashlib.sha256(payload).hexdigest() != fields["sha256"]:
            raise TreeError(f"{where}: damaged: its columns do not have the digest in its first line; calibrate again")
        result = cls()
        result._tasks, result.sources = _names(fields["tasks"], where), _sources(fields["sources"], where)
        result._contexts = _columns(payload, fields, where)
        result._grouped = _number(fields, "grouped", where)
        result._sampled = _number(fields, "sampled", where)
        _check(result._contexts, len(result._tasks), _number(fields, "contexts", where), where)
        return result

    @classmethod
    def _from_rank_paths(cls, paths: RankPaths) -> Self:
        result = cls()
        items = list(paths.items())
        for path, _ in items:
            result._new.append(_short(path), 0, "", UNKNOWN_BIN, 0)
        result._new.counts = [count for _, count in items]
        result._settle()
        return result

    def _settle(self) -> None:
        if self._new.lengths:
            tasks, new = self._new.contexts()
            self._new = _Columns()
            self._combine(tasks, new)

    def _combine(self, tasks: tuple[str, ...], new: Contexts) -> None:
        names = tuple(sorted({*self._tasks, *tasks}))
        if len(names) > 256:
            raise TreeError(f"calibration: expected at most 255 tasks, got {len(names) - 1}; name fewer")
        parts = [
            replace(part, tasks_N=np.array([names.index(name) for name in old], np.uint8)[part.tasks_N])
            for old, part in ((self._tasks, self._contexts), (tasks, new))
        ]
        self._tasks, self._contexts = names, _distinct(parts)


class _Columns:
    """Contexts as they come in, one by one."""

    def __init__(self) -> None:
        self.ranks = bytearray()
        self.lengths: list[int] = []
        self.folds: list[int] = []
        self.tasks: list[str] = []
        self.bins: list[int] = []
        self.steps: list[int] = []
        self.counts: list[int] = []

    def append(self, ranks: Sequence[int], fold: int, task: str, confidence_bin: int, step: int) -> None:
        if not isinstance(task, str):
            raise TreeError(f"task {task!r}: expected a name")
        self.ranks += bytes(ranks)
        self.lengths.append(len(ranks))
        self.folds.append(fold)
        self.tasks.append(task)
        self.bins.append(confidence_bin)
        self.steps.append(step)

    def contexts(self) -> tuple[tuple[str, ...], Contexts]:
        names = tuple(sorted({"", *self.tasks}))
        if len(names) > 256:
            raise TreeError(f"calibration: expected at most 255 tasks, got {len(names) - 1}; name fewer")
        index = {name: i for i, name in enumerate(names)}
        return names, Contexts(
            _unpack(np.array(self.lengths, np.uint8), np.frombuffer(bytes(self.ranks), np.uint8)),
            np.array(self.counts, np.int64) if self.counts else np.ones(len(self.lengths), np.int64),
            np.array(self.folds, np.uint8),
            np.array([index[name] for name in self.tasks], np.uint8),
            np.array(self.bins, np.uint8),
            np.array(self.steps, np.uint16),
        )


def _short(path: tuple[int, ...]) -> tuple[int, ...]:
    if max(path, default=0) >= END or len(path) > END:
        raise TreeError(f"rank path {path!r}: expected ranks and a length below {END}; end it where candidates end")
    return path


def fold_of(group: str) -> int:
    """The fold of a group, the same on every machine and in every version."""
    return int.from_bytes(hashlib.blake2b(group.encode(), digest_size=8).digest(), "little") % FOLDS


def _fold(group: str | int) -> int:
    if isinstance(group, bool) or not isinstance(group, (str, int)):
        raise TreeError(f"group {group!r}: expected the name of a text or the number of a line")
    return fold_of(group if isinstance(group, str) else f"#{group}")


def _bin(confidence: float | None) -> int:
    if confidence is None:
        return UNKNOWN_BIN
    if isinstance(confidence, bool) or not isinstance(confidence, (int, float)) or not 0 <= confidence <= 1:
        raise TreeError(f"confidence {confidence!r}: expected a probability, 0 to 1")
    return min(int(confidence * BINS), BINS - 1)


def _step(context: int | None) -> int:
    if context is None:
        return 0
    longest = (2**16 - 1) * LENGTH_STEP
    if type(context) is not int or not 0 <= context <= longest:
        raise TreeError(f"context {context!r}: expected a number of tokens, 0 to {longest}")
    return max(1, -(-context // LENGTH_STEP))


def _empty() -> Contexts:
    small = np.zeros(0, np.uint8)
    return Contexts(np.zeros((0, 0), np.uint8), np.zeros(0, np.int64), small, small, small, np.zeros(0, np.uint16))


def _unpack(lengths_N: NDArray[np.uint8], ranks: NDArray[np.uint8]) -> NDArray[np.uint8]:
    depth = int(lengths_N.max(initial=0))
    ranks_ND = np.full((len(lengths_N), depth), END, np.uint8)
    ranks_ND[np.arange(depth) < lengths_N[:, None]] = ranks
    return ranks_ND


def _distinct(parts: Iterable[Contexts]) -> Contexts:
    """All of `parts`, sorted, equal contexts counted together."""
    parts = list(parts)
    depth = max(part.depth for part in parts)
    padded = [np.pad(p.ranks_ND, ((0, 0), (0, depth - p.depth)), constant_values=END) for p in parts]
    ranks_ND = np.concatenate(padded)
    rest = {f.name: np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(Contexts)[1:]}
    # All that tells contexts apart, as big-endian words: few keys sort faster than many.
    key = np.zeros((len(ranks_ND), -(-(depth + 5) // 8) * 8), np.uint8)
    for i, name in enumerate(("folds_N", "tasks_N", "bins_N")):
        key[:, i] = rest[name]
    key[:, 3:5] = rest["steps_N"].astype(">u2").view(np.uint8).reshape(-1, 2)
    key[:, 5 : 5 + depth] = ranks_ND
    words = key.view(">u8").astype(np.uint64)
    order_N = np.lexsort(words.T[::-1])
    words = words[order_N]
    first = np.flatnonzero(np.concatenate([np.ones(min(len(words), 1), bool), (words[1:] != words[:-1]).any(1)]))
    counts = np.add.reduceat(rest["counts_N"][order_N], first) if len(first) else rest["counts_N"]
    kept = order_N[first]
    return Contexts(ranks_ND[kept], counts, *(rest[f.name][kept] for f in fields(Contexts)[2:]))


def _columns(payload: bytes, header: dict[str, object], where: str) -> Contexts:
    rows, ranks = _number(header, "rows", where), _number(header, "ranks", where)
    if len(payload) != 10 * rows + ranks:
        raise TreeError(f"{where}: expected {10 * rows + ranks} bytes behind its first line, got {len(payload)}")
    lengths_N, folds_N, tasks_N, bins_N = np.frombuffer(payload, np.uint8, 4 * rows).reshape(4, rows)
    if int(lengths_N.sum(dtype=np.int64)) != ranks:
        raise TreeError(f"{where}: its path lengths add up to {lengths_N.sum(dtype=np.int64)}, expected {ranks}")
    return Contexts(
        _unpack(lengths_N, np.frombuffer(payload, np.uint8, ranks, 10 * rows)),
        np.frombuffer(payload, "<u4", rows, 6 * rows).astype(np.int64),
        folds_N,
        tasks_N,
        bins_N,
        np.frombuffer(payload, "<u2", rows, 4 * rows).astype(np.uint16),
    )


def _check(contexts: Contexts, tasks: int, total: int, where: str) -> None:
    inside_ND = contexts.ranks_ND != END
    sound = (
        contexts.total == total
        and contexts.counts_N.min(initial=1) >= 1
        and contexts.folds_N.max(initial=0) < FOLDS
        and contexts.tasks_N.max(initial=0) < tasks
        and ((contexts.bins_N < BINS) | (contexts.bins_N == UNKNOWN_BIN)).all()
        and not (inside_ND[:, 1:] & ~inside_ND[:, :-1]).any()
    )
    if not sound:
        raise TreeError(f"{where}: its columns hold values out of range or not {total} contexts; calibrate again")


def _number(header: dict[str, object], name: str, where: str) -> int:
    value = header[name]
    if type(value) is not int or value < 0:
        raise TreeError(f"{where}: {name} is {value!r}; expected a whole number, 0 or more")
    return value


def _names(value: object, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value) or value[:1] != [""]:
        raise TreeError(f"{where}: tasks are {value!r}; expected a list of names that begins with ''")
    return tuple(value)


def _sources(value: object, where: str) -> dict[str, int]:
    if not isinstance(value, dict) or not all(type(done) is int and done >= 0 for done in value.values()):
        raise TreeError(f"{where}: sources are {value!r}; expected how far each has been counted")
    return dict(value)
