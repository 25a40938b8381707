"""Latency tables: the cost of every step of a teacher and its drafter on one machine. Plans are made from them.

One format, ``draftwood.latency``, for tables that were measured and for tables that were modelled; ``source``
says which. All times are in seconds, all memory in bytes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from functools import cached_property
from itertools import pairwise
from typing import Annotated, Any, Final, Literal, get_args

import msgspec

from draftwood.errors import TreeError
from draftwood.trees._json import read_form

LATENCY_FORMAT: Final = "draftwood.latency"
LATENCY_VERSION: Final = 2

Source = Literal["measured", "modelled"]
EntryKind = Literal["decode", "verify", "prefill", "draft", "commit", "host"]
KvRead = Literal["static", "filled"]
Mark = Literal["vendor simulator", "public document", "code", "derived", "assumption", "fitted"]

# The most texts of one launch, as of a bundle's graphs.
MOST_TEXTS: Final = 32
# Seconds below every launch of a step: a plan divides by them.
_LEAST_STEP_S = 1e-9
# Beyond every machine; numbers computed from them stay within 64 bits.
_Size = Annotated[int, msgspec.Meta(ge=0, le=10_000_000)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=100)]
_Text = Annotated[str, msgspec.Meta(min_length=1)]

# The fields that name an entry, by kind.
_SHAPES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("decode", "verify", "prefill"), ("rows", "slots")),
    "draft": ("depth", "width"),
    "commit": (),
    "host": (),
}
_ORDER = {kind: i for i, kind in enumerate(get_args(EntryKind))}


class LatencyEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The cost of one graph, or of the host's share of a step.

    A measured entry has ``quartiles`` and ``samples``, a modelled one ``parts``.
    """

    kind: EntryKind
    # Median of the samples, or the model's answer.
    seconds: _Seconds
    # Rows of the step (1 for decode, T of a tree, the chunk of a prefill) and KV length C.
    rows: _Size = 0
    slots: _Size = 0
    # A whole draft: levels ahead, candidates per node.
    depth: _Size = 0
    width: _Size = 0
    # In the launch. Rows are counted for each text, padding included; seconds are for the whole launch.
    texts: Annotated[int, msgspec.Meta(ge=1, le=MOST_TEXTS)] = 1
    # First and third quartile.
    quartiles: tuple[_Seconds, _Seconds] | None = None
    samples: _Count = 0
    # Committed tokens when the step was timed; used if ``kv_read`` is "filled".
    filled: _Count = 0
    # Parts of the seconds by name; their sum is ``seconds``.
    parts: Mapping[str, _Seconds] = {}
    # Memory that one more such graph takes; 0 if unknown.
    bytes: _Count = 0

    def __post_init__(self) -> None:
        for name in ("rows", "slots", "depth", "width"):
            if (getattr(self, name) > 0) != (name in _SHAPES[self.kind]):
                expected = "1 or more" if name in _SHAPES[self.kind] else "0, it has none"
                raise ValueError(f"{self.kind} entry: {name} is {getattr(self, name)}; expected {expected}")
        if self.kind == "prefill" and self.texts > 1:
            raise ValueError(f"prefill entry: of {self.texts} texts; expected 1, a prompt has launches of its own")
        if self.kind == "decode" and self.rows != 1:
            raise ValueError(f"decode entry: rows is {self.rows}; expected 1, more rows are of kind verify")
        if self.kind in ("decode", "verify") and self.seconds < _LEAST_STEP_S:
            raise ValueError(f"{self.kind} entry: a step of {self.seconds} seconds; expected {_LEAST_STEP_S} or more")
        low, high = self.quartiles or (self.seconds, self.seconds)
        if not low <= self.seconds <= high:
            raise ValueError(f"{self.kind} entry: median {self.seconds} lies outside its quartiles {low} to {high}")

    @property
    def shape(self) -> tuple[int, ...]:
        """Texts, then (rows, slots), (depth, width) or nothing: unique within its kind."""
        return (self.texts, *(getattr(self, name) for name in _SHAPES[self.kind]))


class Assumption(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A figure that a model used, and why it is believed."""

    name: _Text
    value: float
    unit: str
    mark: Mark
    source: _Text


class LatencyTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """Costs by shape. Look-ups pad upwards, as a static graph does: the next larger shape in the table runs.

    Example:
        >>> def step(rows: int, seconds: float) -> LatencyEntry:
        ...     return LatencyEntry(kind="verify", rows=rows, slots=512, seconds=seconds, parts={"all": seconds})
        >>> table = LatencyTable(source="modelled", entries=(step(1, 0.010), step(8, 0.012), step(16, 0.013)))
        >>> table.step_s(9, 300), table.rows(512)
        (0.013, (1, 8, 16))
    """

    format: Literal["draftwood.latency"] = LATENCY_FORMAT
    version: Literal[2] = LATENCY_VERSION
    source: Source
    # "static": a step reads all C slots of its cache, masked ones too. "filled": it reads only the filled slots, and a
    # figure for C holds for a text of the entry's ``filled`` tokens.
    kv_read: KvRead = "static"
    # The machine's description, as plain values.
    machine: Mapping[str, Any] = {}
    # Name and digest of the teacher, if there is one.
    teacher: Mapping[str, Any] = {}
    # Kind and sizes of the drafter; empty without one.
    drafter: Mapping[str, Any] = {}
    # Remarks for readers of the figures, a sentence each.
    notes: tuple[str, ...] = ()
    constants: tuple[Assumption, ...] = ()
    entries: tuple[LatencyEntry, ...]

    def __post_init__(self) -> None:
        for entry in self.entries:
            self._check(entry)
        ordered = tuple(sorted(self.entries, key=lambda entry: (_ORDER[entry.kind], entry.shape)))
        for entry_before, other in pairwise(ordered):
            if (entry_before.kind, entry_before.shape) == (other.kind, other.shape):
                raise ValueError(f"two {entry_before.kind} entries of shape {entry_before.shape}; keep one")
        msgspec.structs.force_setattr(self, "entries", ordered)
        if not self._steps:
            raise ValueError("no decode or verify entry; expected at least one step of the teacher")
        for kind in ("draft", "commit", "host"):
            texts = {entry.texts for entry in self.entries if entry.kind == kind}
            # They would cost nothing, or nothing could be drafted, only because the table has a hole.
            if texts and (missing := sorted(set(self.texts) - texts)):
                raise ValueError(f"steps of {missing[0]} texts, but no {kind} of so many; expected it for all or none")

    def _check(self, entry: LatencyEntry) -> None:
        """Refuses an entry that lacks what this table's source owes: a spread, or parts that add up."""
        if self.source == "measured" and (entry.quartiles is None or not entry.samples):
            raise ValueError(f"measured {entry.kind} entry {entry.shape}: has no quartiles and samples")
        # The parts may have been summed in another order, so not to the last bit.
        added = math.isclose(sum(entry.parts.values()), entry.seconds, rel_tol=1e-9, abs_tol=1e-15)
        if self.source == "modelled" and not added:
            raise ValueError(f"modelled {entry.kind} entry {entry.shape}: its parts do not add up to its seconds")

    @cached_property
    def _steps(self) -> dict[int, dict[int, dict[int, LatencyEntry]]]:
        """Texts -> KV length -> rows -> step, all ascending."""
        steps: dict[int, dict[int, dict[int, LatencyEntry]]] = {}
        for entry in sorted(self.entries, key=lambda entry: (entry.texts, entry.slots, entry.rows)):
            if entry.kind in ("decode", "verify"):
                # A verify entry of one row is the same graph as decode, which comes first and counts.
                steps.setdefault(entry.texts, {}).setdefault(entry.slots, {}).setdefault(entry.rows, entry)
        return steps

    @property
    def drafts(self) -> bool:
        """Whether there are times of drafts; without any they cost nothing."""
        return any(entry.kind == "draft" for entry in self.entries)

    @property
    def texts(self) -> tuple[int, ...]:
        """Numbers of texts of a launch that there are steps for, ascending."""
        return tuple(self._steps)

    @property
    def slots(self) -> tuple[int, ...]:
        """KV lengths with a step of one text, or of the fewest, ascending."""
        return tuple(next(iter(self._steps.values())))

    def rows(self, slots: int, texts: int = 1) -> tuple[int, ...]:
        """Row counts with a step at KV length `slots`, or at the next larger one of the table."""
        return tuple(self._at(slots, texts))

    def step_s(self, rows: int, slots: int, texts: int = 1) -> float:
        """Seconds of a teacher step: `rows` rows of each text at KV length `slots`, all padded up to an entry.

        Raises:
            TreeError: the table has no step that large.
        """
        return self._step(rows, slots, texts).seconds

    def length(self, rows: int, slots: int, texts: int = 1) -> int:
        """Tokens of the text that `step_s` of the same step holds for: those it was timed after if only filled slots
        are read, and the KV length otherwise, or if the entry does not say."""
        filled = self._step(rows, slots, texts).filled if self.kv_read == "filled" else 0
        return filled or slots

    def draft_s(self, depth: int, width: int, texts: int = 1) -> float:
        """Seconds of one whole draft of `depth` levels with `width` candidates per node, for `texts` texts.

        The cheapest draft in the table that offers both; 0.0 for depth 0 and if there are no draft entries.

        Raises:
            TreeError: every draft in the table offers less.
        """
        drafts = [entry for entry in self.entries if entry.kind == "draft" and entry.texts == self._padded(texts)]
        if not depth or not self.drafts:
            return 0.0
        enough = [entry.seconds for entry in drafts if entry.depth >= depth and entry.width >= width]
        if not enough:
            got = max(((entry.depth, entry.width) for entry in drafts), default=(0, 0))
            raise TreeError(
                f"latency table: no draft of depth {depth} and width {width}; it goes up to depth {got[0]} and"
                f" width {max((entry.width for entry in drafts), default=0)}; draft less or profile again"
            )
        return min(enough)

    def host_s(self, texts: int = 1) -> float:
        """Seconds that a step spends on the host and on a separate commit; 0.0 if the table has neither."""
        entries = (e for e in self.entries if e.kind in ("commit", "host") and e.texts == self._padded(texts))
        return math.fsum(entry.seconds for entry in entries)

    def to_json(self) -> str:
        """The table as JSON in a fixed order: equal tables give equal text."""
        return msgspec.json.encode(self, order="deterministic").decode() + "\n"

    @classmethod
    def from_json(cls, text: str, where: str = "latency table") -> LatencyTable:
        """The table in `text`, as `to_json` writes it; TreeError, beginning with `where`, for anything else."""
        return read_form(text, cls, LATENCY_FORMAT, LATENCY_VERSION, where)

    def _step(self, rows: int, slots: int, texts: int) -> LatencyEntry:
        steps, of_texts = self._at(slots, texts), f" of each of {texts} texts" if texts > 1 else ""
        return steps[_least(steps, rows, f"of {rows} rows{of_texts} at KV length {slots}", " rows", "more --rows")]

    def _padded(self, texts: int) -> int:
        """The number of texts of the smallest graphs that hold ``texts``."""
        return _least(self._steps, texts, f"of {texts} texts", "", "more --batch-size")

    def _at(self, slots: int, texts: int) -> dict[int, LatencyEntry]:
        steps = self._steps[self._padded(texts)]
        what = f"of {texts} texts at KV length {slots}" if texts > 1 else f"at KV length {slots}"
        return steps[_least(steps, slots, what, "", "a larger --kv")]


def _least(sizes: Collection[int], size: int, step: str, unit: str, more: str) -> int:
    """The first of ascending ``sizes`` that holds ``size``; TreeError if none does, with the option that gives one."""
    padded = next((each for each in sizes if each >= size), None)
    if padded is None:
        raise TreeError(f"latency table: no step {step}; it goes up to {max(sizes)}{unit}; profile again with {more}")
    return padded
