"""Calibration statistics: the rank path that a teacher's text took at each context, and the context's attributes.

A context is one position of the teacher's text. It has two optional attributes: a length (tokens before it) and the
name of a task. Equal contexts are counted together, so statistics of two runs merge by addition.

Contexts of one text resemble each other. Whole groups (texts) therefore go into one of 128 folds, chosen by a hash
of the group's name alone. Intervals take a fold as one observation. A held-out group stays held out in every merge.

Shape suffixes: N distinct contexts, D depth of the longest path.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Final, Literal, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from draftwood.errors import TreeError
from draftwood.trees._json import read_form
from draftwood.trees.topology import rank_path

CALIBRATION_FORMAT: Final = "draftwood.calibration"
CALIBRATION_VERSION: Final = 2
FOLDS = 128
# Fills a path's row after its last rank.
END = 255
# Lengths are kept in steps of 64 tokens, rounded up; step 0 is an unknown length.
LENGTH_STEP = 64

# Stays within 64 bits, sums included.
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Part = Literal["counted", "heldout"]
# The last fold in every eight is held out for reports; trees are made from the others.
HELD_FOLDS = 8
# A context as it came in: its ranks, fold, task and length step.
_Row = tuple[bytes, int, str, int]


class _Columns(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The first line of a file: the models of its columns, and their number."""

    format: Literal["draftwood.calibration"] = CALIBRATION_FORMAT
    version: Literal[2] = CALIBRATION_VERSION
    contexts: _Count
    # Contexts with the name of their text, and contexts of sampled text.
    grouped: _Count
    sampled: _Count
    tasks: tuple[str, ...]
    sources: dict[str, _Count]
    # Digests of the models, by what each is; empty if unknown.
    models: dict[str, str] = {}
    # Distinct contexts, and ranks of all their paths.
    rows: _Count
    ranks: _Count
    sha256: str


@dataclass(frozen=True, slots=True)
class Contexts:
    """Distinct contexts and how often each occurred, as columns.

    Args:
        ranks_ND: uint8[N, D], the rank path, then `END`.
        counts_N: int64[N], 1 or more.
        folds_N: uint8[N], below `FOLDS`.
        tasks_N: uint8[N], index into the names of tasks.
        steps_N: uint16[N], length in steps of `LENGTH_STEP` tokens, rounded up; 0 if unknown.
    """

    ranks_ND: NDArray[np.uint8]
    counts_N: NDArray[np.int64]
    folds_N: NDArray[np.uint8]
    tasks_N: NDArray[np.uint8]
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
        models: digests of the models whose paths are counted, by what each is; empty if unknown.

    Example:
        >>> calibration = Calibration()
        >>> calibration.add((0, 2), group="text 1", context=412)
        >>> calibration.add((), group="text 1")
        >>> calibration.contexts.total, Calibration.from_bytes(calibration.to_bytes()) == calibration
        (2, True)
    """

    def __init__(self) -> None:
        self.sources: dict[str, int] = {}
        self.models: dict[str, str] = {}
        self._grouped = self._sampled = 0
        self._tasks: tuple[str, ...] = ("",)
        self._contexts = _empty()
        self._new: list[_Row] = []

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
        """The number of contexts of sampled text; the others are greedy or unknown."""
        return self._sampled

    def part(self, part: Part) -> Contexts:
        """The contexts that trees are made from (counted) or that figures are reported for (heldout)."""
        held_N = self.contexts.folds_N % HELD_FOLDS == HELD_FOLDS - 1
        return self.contexts.where(held_N if part == "heldout" else ~held_N)

    def add(
        self,
        path: Sequence[int],
        *,
        group: str | int,
        context: int | None = None,
        task: str = "",
        sampled: bool = False,
    ) -> None:
        """Count one context.

        Args:
            path: its rank path, each rank below 255; empty if the truth was no candidate at all.
            group: the text it belongs to, or the number of a line that stands for itself alone.
            context: tokens in front of it, 0 or more.
            sampled: whether the text was drawn at a temperature above 0.

        Raises:
            TreeError: one of these is something else.
        """
        ranks = _short(rank_path(path))
        fold = fold_of(group if isinstance(group, str) else f"#{group}")
        self._new.append((bytes(ranks), fold, task, _step(context)))
        self._grouped += isinstance(group, str)
        self._sampled += sampled

    def merge(self, other: Calibration) -> None:
        """Add all contexts of `other`; TreeError if they are known to be of other models."""
        if self.models and other.models and (name := differing(self.models, other.models)):
            raise TreeError(f"calibration: the counts are of two {name}s; give those of one")
        self.models = self.models or other.models
        self._settle()
        other._settle()
        self._combine(other._tasks, other._contexts)
        self._grouped += other._grouped
        self._sampled += other._sampled
        for source, done in other.sources.items():
            self.sources[source] = max(self.sources.get(source, 0), done)

    def to_bytes(self) -> bytes:
        """The file: a line of JSON, then the columns; equal contents give equal bytes.

        Columns of N entries: path length u1, fold u1, task u1, length step u2, count u4; then the
        ranks of all paths in turn, u1. Little-endian.

        Raises:
            TreeError: a count that 32 bits do not hold.
        """
        contexts = self.contexts
        if contexts.counts_N.max(initial=0) >= 2**32:
            raise TreeError(f"calibration: a context counted {contexts.counts_N.max()} times; expected below 2^32")
        inside_ND = contexts.ranks_ND != END
        payload = b"".join(
            [
                inside_ND.sum(1, dtype=np.uint8).tobytes(),
                contexts.folds_N.tobytes(),
                contexts.tasks_N.tobytes(),
                contexts.steps_N.astype("<u2").tobytes(),
                contexts.counts_N.astype("<u4").tobytes(),
                contexts.ranks_ND[inside_ND].tobytes(),
            ]
        )
        header = _Columns(
            contexts=contexts.total,
            grouped=self._grouped,
            sampled=self._sampled,
            tasks=self._tasks,
            sources=dict(sorted(self.sources.items())),
            models=dict(sorted(self.models.items())),
            rows=len(contexts.counts_N),
            ranks=int(inside_ND.sum()),
            sha256=hashlib.sha256(payload).hexdigest(),
        )
        return msgspec.json.encode(header) + b"\n" + payload

    @classmethod
    def from_bytes(cls, data: bytes, where: str = "calibration") -> Self:
        """The statistics in `data`, as `to_bytes` writes them; TreeError if they are damaged or something else."""
        line, _, payload = data.partition(b"\n")
        header = read_form(line, _Columns, CALIBRATION_FORMAT, CALIBRATION_VERSION, where)
        if hashlib.sha256(payload).hexdigest() != header.sha256:
            raise TreeError(f"{where}: damaged: its columns do not have the digest in its first line; calibrate again")
        result = cls()
        result._tasks, result.sources, result.models = header.tasks, header.sources, header.models
        result._contexts = _columns(payload, header, where)
        result._grouped, result._sampled = header.grouped, header.sampled
        _check(result._contexts, header, where)
        return result

    def _settle(self) -> None:
        if self._new:
            tasks, new = _columns_of(self._new)
            self._new = []
            self._combine(tasks, new)

    def _combine(self, tasks: tuple[str, ...], new: Contexts) -> None:
        names = _task_names(self._tasks, tasks)
        parts = [
            replace(part, tasks_N=np.array([names.index(name) for name in old], np.uint8)[part.tasks_N])
            for old, part in ((self._tasks, self._contexts), (tasks, new))
        ]
        self._tasks, self._contexts = names, _distinct(parts)


def _columns_of(rows: Sequence[_Row]) -> tuple[tuple[str, ...], Contexts]:
    """Names of tasks, and contexts that came in one by one as columns."""
    ranks, folds, tasks, steps = zip(*rows, strict=True)
    names = _task_names(("",), tasks)
    index = {name: i for i, name in enumerate(names)}
    return names, Contexts(
        _unpack(np.array([len(path) for path in ranks], np.uint8), np.frombuffer(b"".join(ranks), np.uint8)),
        np.ones(len(rows), np.int64),
        np.array(folds, np.uint8),
        np.array([index[name] for name in tasks], np.uint8),
        np.array(steps, np.uint16),
    )


def _task_names(*tasks: Iterable[str]) -> tuple[str, ...]:
    names = tuple(sorted({name for part in tasks for name in part}))
    if len(names) > 256:
        raise TreeError(f"calibration: expected at most 255 tasks, got {len(names) - 1}; name fewer")
    return names


def _short(path: tuple[int, ...]) -> tuple[int, ...]:
    if max(path, default=0) >= END or len(path) > END:
        raise TreeError(f"rank path {path!r}: expected ranks and a length below {END}; end it where candidates end")
    return path


def differing(models: Mapping[str, str], others: Mapping[str, str]) -> str | None:
    """The first model, by its role, that differs from the other's."""
    return next((name for name in sorted({*models, *others}) if models.get(name) != others.get(name)), None)


def fold_of(group: str) -> int:
    """The fold of a group, the same on every machine and in every version."""
    return int.from_bytes(hashlib.blake2b(group.encode(), digest_size=8).digest(), "little") % FOLDS


def _step(context: int | None) -> int:
    if context is None:
        return 0
    longest = (2**16 - 1) * LENGTH_STEP
    if not 0 <= context <= longest:
        raise TreeError(f"context {context!r}: expected a number of tokens, 0 to {longest}")
    return max(1, -(-context // LENGTH_STEP))


def _empty() -> Contexts:
    small = np.zeros(0, np.uint8)
    return Contexts(np.zeros((0, 0), np.uint8), np.zeros(0, np.int64), small, small, np.zeros(0, np.uint16))


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
    # Everything that tells contexts apart, as big-endian words: few keys sort faster than many.
    key = np.zeros((len(ranks_ND), -(-(depth + 4) // 8) * 8), np.uint8)
    key[:, 0], key[:, 1] = rest["folds_N"], rest["tasks_N"]
    key[:, 2:4] = rest["steps_N"].astype(">u2").view(np.uint8).reshape(-1, 2)
    key[:, 4 : 4 + depth] = ranks_ND
    words = key.view(">u8").astype(np.uint64)
    order_N = np.lexsort(words.T[::-1])
    words = words[order_N]
    first = np.flatnonzero(np.concatenate([np.ones(min(len(words), 1), bool), (words[1:] != words[:-1]).any(1)]))
    counts = np.add.reduceat(rest["counts_N"][order_N], first) if len(first) else rest["counts_N"]
    distinct = order_N[first]
    return Contexts(ranks_ND[distinct], counts, *(rest[f.name][distinct] for f in fields(Contexts)[2:]))


def _columns(payload: bytes, header: _Columns, where: str) -> Contexts:
    rows, ranks = header.rows, header.ranks
    if len(payload) != 9 * rows + ranks:
        raise TreeError(f"{where}: expected {9 * rows + ranks} bytes after its first line, got {len(payload)}")
    lengths_N, folds_N, tasks_N = np.frombuffer(payload, np.uint8, 3 * rows).reshape(3, rows)
    if int(lengths_N.sum(dtype=np.int64)) != ranks:
        raise TreeError(f"{where}: its path lengths add up to {lengths_N.sum(dtype=np.int64)}, expected {ranks}")
    return Contexts(
        _unpack(lengths_N, np.frombuffer(payload, np.uint8, ranks, 9 * rows)),
        np.frombuffer(payload, "<u4", rows, 5 * rows).astype(np.int64),
        folds_N,
        tasks_N,
        np.frombuffer(payload, "<u2", rows, 3 * rows).astype(np.uint16),
    )


def _check(contexts: Contexts, header: _Columns, where: str) -> None:
    inside_ND = contexts.ranks_ND != END
    sound = (
        contexts.total == header.contexts
        and header.tasks[:1] == ("",)
        and contexts.counts_N.min(initial=1) >= 1
        and contexts.folds_N.max(initial=0) < FOLDS
        and contexts.tasks_N.max(initial=0) < len(header.tasks)
        and not (inside_ND[:, 1:] & ~inside_ND[:, :-1]).any()
    )
    if not sound:
        raise TreeError(
            f"{where}: its columns hold values out of range or not {header.contexts} contexts; calibrate again"
        )
