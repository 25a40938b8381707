"""What every step of a teacher and its drafter costs on one machine: the table that plans are made from.

One format, ``draftwood.latency``, for tables that were measured and for tables that were modelled; ``source``
says which. All times are in seconds, all memory in bytes.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, get_args

from draftwood.errors import TreeError
from draftwood.trees._json import expect_format, load_json

LATENCY_FORMAT = "draftwood.latency"

Source = Literal["measured", "modelled"]
EntryKind = Literal["decode", "verify", "prefill", "draft", "commit", "host"]
KvRead = Literal["static", "filled"]
Mark = Literal["vendor simulator", "public document", "code", "derived", "assumption", "fitted"]

# What names an entry of each kind, beside the kind.
_SHAPES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("decode", "verify", "prefill"), ("rows", "slots")),
    "draft": ("depth", "width"),
    "commit": (),
    "host": (),
}
_SIZES = ("rows", "slots", "depth", "width")
# Beyond every machine; what is computed of them stays within 64 bits.
_MOST_SIZE, _MOST_BYTES = 10_000_000, 2**62
_ORDER = {kind: i for i, kind in enumerate(get_args(EntryKind))}
_TABLE_KEYS = {"source", "kv_read", "machine", "teacher", "drafter", "notes", "constants", "entries"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyEntry:
    """The cost of one graph, or of the host's share of a step.

    A measured entry has ``quartiles`` and ``samples``, a modelled one ``parts``.
    """

    kind: EntryKind
    # Median of the samples, or the model's answer.
    seconds: float
    # Rows of the step (1 for decode, T of a tree, the chunk of a prefill) and KV length C.
    rows: int = 0
    slots: int = 0
    # Of a whole draft: levels ahead, candidates per node.
    depth: int = 0
    width: int = 0
    # First and third quartile.
    quartiles: tuple[float, float] | None = None
    samples: int = 0
    # Committed tokens behind which the step was timed; of use where ``kv_read`` is "filled".
    filled: int = 0
    # What the seconds are made of, by name; they add up to them.
    parts: Mapping[str, float] = field(default_factory=dict)
    # Memory that one more such graph takes; 0 where unknown.
    bytes: int = 0

    def __post_init__(self) -> None:
        if self.kind not in _SHAPES:
            raise TreeError(f"entry kind {self.kind!r}: expected one of {', '.join(_SHAPES)}")
        for name in (*_SIZES, "samples", "filled", "bytes"):
            self._check_whole(name)
        if self.kind == "decode" and self.rows != 1:
            raise TreeError(f"decode entry: rows is {self.rows}; expected 1, more rows are of kind verify")
        low, high = (self.seconds, self.seconds) if self.quartiles is None else self.quartiles
        for what, value in (("seconds", self.seconds), ("quartiles", low), ("quartiles", high), *self.parts.items()):
            if type(value) not in (int, float) or not 0 <= value < math.inf:
                raise TreeError(
                    f"{self.kind} entry: {what} is {value!r}; expected a finite number of seconds, 0 or more"
                )
        if not low <= self.seconds <= high:
            raise TreeError(f"{self.kind} entry: median {self.seconds} lies outside its quartiles {low} to {high}")

    def _check_whole(self, name: str) -> None:
        value, named = getattr(self, name), name in _SHAPES[self.kind]
        most = _MOST_SIZE if name in _SIZES else _MOST_BYTES
        if type(value) is int and value > most:
            raise TreeError(f"{self.kind} entry: {name} has {value.bit_length()} bits; expected {most} at most")
        if type(value) is int and (value >= 1 if named else value == 0 or (name not in _SIZES and value > 0)):
            return
        wanted = "a whole number of 1 or more" if named else "0, it has none" if name in _SIZES else "0 or more"
        raise TreeError(f"{self.kind} entry: {name} is {value!r}; expected {wanted}")

    @property
    def shape(self) -> tuple[int, ...]:
        """What tells it from others of its kind: (rows, slots), (depth, width) or nothing."""
        return tuple(getattr(self, name) for name in _SHAPES[self.kind])


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """A figure that a model used, and why it is believed."""

    name: str
    value: float
    unit: str
    mark: Mark
    source: str

    def __post_init__(self) -> None:
        if self.mark not in get_args(Mark):
            raise TreeError(f"constant {self.name}: mark {self.mark!r}; expected one of {', '.join(get_args(Mark))}")
        if type(self.value) not in (int, float) or not math.isfinite(self.value):
            raise TreeError(f"constant {self.name}: value is {self.value!r}; expected a finite number")
        if not self.source:
            raise TreeError(f"constant {self.name}: has no source; say where the figure comes from")


@dataclass(frozen=True, kw_only=True)
class LatencyTable:
    """Costs by shape. Look-ups pad upwards, as a static graph does: the next larger shape in the table runs.

    Example:
        >>> def step(rows: int, seconds: float) -> LatencyEntry:
        ...     return LatencyEntry(kind="verify", rows=rows, slots=512, seconds=seconds, parts={"all": seconds})
        >>> table = LatencyTable(source="modelled", entries=(step(1, 0.010), step(8, 0.012), step(16, 0.013)))
        >>> table.step_s(9, 300), table.rows(512)
        (0.013, (1, 8, 16))
    """

    source: Source
    entries: tuple[LatencyEntry, ...]
    # Whether a step reads all C slots of its cache, masked ones too, or only the filled ones: then a table's
    # figure for C holds for a text of the entry's ``filled`` tokens.
    kv_read: KvRead = "static"
    # What the machine is, as plain values.
    machine: Mapping[str, Any] = field(default_factory=dict)
    # Name and digest of the teacher, where there is one.
    teacher: Mapping[str, Any] = field(default_factory=dict)
    # Kind and sizes of the drafter; empty without one.
    drafter: Mapping[str, Any] = field(default_factory=dict)
    # What a reader of the figures must know, a sentence each.
    notes: tuple[str, ...] = ()
    constants: tuple[Constant, ...] = ()
    # Where the table came from, for messages; not part of it.
    where: str = field(default="latency table", compare=False)
    # KV length -> rows -> step, both ascending.
    _steps: dict[int, dict[int, LatencyEntry]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.source not in get_args(Source) or self.kv_read not in get_args(KvRead):
            raise TreeError(
                f"source {self.source!r}, kv_read {self.kv_read!r}; expected one of {', '.join(get_args(Source))}"
                f" and one of {', '.join(get_args(KvRead))}"
            )
        for entry in self.entries:
            self._check(entry)
        ordered = tuple(sorted(self.entries, key=lambda entry: (_ORDER[entry.kind], entry.shape)))
        for one, other in pairwise(ordered):
            if (one.kind, one.shape) == (other.kind, other.shape):
                raise TreeError(f"two {one.kind} entries of shape {one.shape}; keep one")
        object.__setattr__(self, "entries", ordered)
        steps: dict[int, dict[int, LatencyEntry]] = {}
        for entry in sorted(ordered, key=lambda entry: (entry.slots, entry.rows)):
            if entry.kind in ("decode", "verify"):
                # A verify entry of one row is the same graph as decode, which comes first and counts.
                steps.setdefault(entry.slots, {}).setdefault(entry.rows, entry)
        if not steps:
            raise TreeError("no decode or verify entry; expected at least one step of the teacher")
        object.__setattr__(self, "_steps", steps)

    def _check(self, entry: LatencyEntry) -> None:
        """Refuses an entry that lacks what this table's source owes: a spread, or parts that add up."""
        if self.source == "measured" and (entry.quartiles is None or not entry.samples):
            raise TreeError(f"measured {entry.kind} entry {entry.shape}: has no quartiles and samples")
        # The parts may have been summed in another order, so not to the last bit.
        added = math.isclose(sum(entry.parts.values()), entry.seconds, rel_tol=1e-9, abs_tol=1e-15)
        if self.source == "modelled" and not added:
            raise TreeError(f"modelled {entry.kind} entry {entry.shape}: its parts do not add up to its seconds")

    @property
    def slots(self) -> tuple[int, ...]:
        """KV lengths with a step, ascending."""
        return tuple(self._steps)

    def rows(self, slots: int) -> tuple[int, ...]:
        """Row counts with a step at KV length `slots` or, where the table has none, the next larger one."""
        return tuple(self._at(slots))

    def step_s(self, rows: int, slots: int) -> float:
        """Seconds of a teacher step of `rows` rows at KV length `slots`, both padded up to an entry.

        Raises:
            TreeError: the table has no step that large.
        """
        return self._step(rows, slots).seconds

    def graph_bytes(self, rows: int, slots: int) -> int:
        """Memory of one more graph of that shape, 0 where unknown; TreeError as `step_s`."""
        return self._step(rows, slots).bytes

    def draft_s(self, depth: int, width: int) -> float:
        """Seconds of one whole draft of `depth` levels with `width` candidates per node.

        The cheapest draft in the table that offers both; 0.0 for depth 0 and where there are no draft entries.

        Raises:
            TreeError: every draft in the table offers less.
        """
        drafts = [entry for entry in self.entries if entry.kind == "draft"]
        if not depth or not drafts:
            return 0.0
        enough = [entry.seconds for entry in drafts if entry.depth >= depth and entry.width >= width]
        if not enough:
            got = (max(entry.depth for entry in drafts), max(entry.width for entry in drafts))
            raise TreeError(
                f"{self.where}: no draft of depth {depth} and width {width}; it goes up to depth {got[0]} and"
                f" width {got[1]}; draft less or profile again"
            )
        return min(enough)

    def host_s(self) -> float:
        """Seconds a step spends on the host and on a commit of its own; 0.0 where the table says nothing."""
        return math.fsum(entry.seconds for entry in self.entries if entry.kind in ("commit", "host"))

    def to_json(self) -> str:
        """The table as JSON in a fixed order: equal tables give equal text."""
        value = {
            "format": LATENCY_FORMAT,
            "version": 1,
            "source": self.source,
            "kv_read": self.kv_read,
            "machine": dict(sorted(self.machine.items())),
            "teacher": dict(sorted(self.teacher.items())),
            "drafter": dict(sorted(self.drafter.items())),
            "notes": list(self.notes),
            "constants": [
                {name: getattr(constant, name) for name in ("name", "value", "unit", "mark", "source")}
                for constant in self.constants
            ],
            "entries": [_entry_value(entry) for entry in self.entries],
        }
        return json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str, where: str = "latency table") -> "LatencyTable":
        """The table in `text`, as `to_json` writes it; TreeError, beginning with `where`, for anything else."""
        value = expect_format(load_json(text, where), LATENCY_FORMAT, _TABLE_KEYS, where)
        try:
            entries = tuple(_entry(item) for item in _list(value, "entries"))
            constants = tuple(_constant(item) for item in _list(value, "constants"))
            notes = tuple(_text("notes", item) for item in _list(value, "notes"))
            facts = {name: _object(name, value[name]) for name in ("machine", "teacher", "drafter")}
            source, kv_read = (_text(name, value[name]) for name in ("source", "kv_read"))
            return cls(
                source=source,  # type: ignore[arg-type]  # checked by the table itself
                kv_read=kv_read,  # type: ignore[arg-type]
                entries=entries,
                constants=constants,
                notes=notes,
                where=where,
                **facts,
            )
        except TreeError as error:
            raise TreeError(f"{where}: {error}") from error

    def _at(self, slots: int) -> dict[int, LatencyEntry]:
        found = next((size for size in self._steps if size >= slots), None)
        if found is None:
            raise TreeError(
                f"{self.where}: no step at KV length {slots}; it goes up to {max(self._steps)}; profile again with"
                " a larger --kv"
            )
        return self._steps[found]

    def _step(self, rows: int, slots: int) -> LatencyEntry:
        steps = self._at(slots)
        found = next((size for size in steps if size >= rows), None)
        if found is None:
            raise TreeError(
                f"{self.where}: no step of {rows} rows at KV length {slots}; it goes up to {max(steps)} rows;"
                " profile again with more --rows"
            )
        return steps[found]


def _entry_value(entry: LatencyEntry) -> dict[str, object]:
    """An entry without the keys that say nothing."""
    value: dict[str, object] = {"kind": entry.kind}
    value |= {name: getattr(entry, name) for name in _SHAPES[entry.kind]}
    value["seconds"] = entry.seconds
    if entry.quartiles is not None:
        value["quartiles"] = list(entry.quartiles)
    value |= {name: getattr(entry, name) for name in ("samples", "filled", "bytes") if getattr(entry, name)}
    return value | ({"parts": dict(entry.parts)} if entry.parts else {})


def _entry(value: object) -> LatencyEntry:
    fields = dict(_object("entry", value))
    kind = fields.get("kind")
    required = {"kind", "seconds", *_SHAPES.get(kind if isinstance(kind, str) else "", ())}
    allowed = required | {"quartiles", "samples", "filled", "parts", "bytes"}
    if not required <= set(fields) <= allowed:
        raise TreeError(f"{kind} entry: expected the keys {sorted(required)} and no other than {sorted(allowed)}")
    if "quartiles" in fields:
        pair = fields["quartiles"]
        if not isinstance(pair, list) or len(pair) != 2:
            raise TreeError(f"{kind} entry: quartiles are {pair!r}; expected two numbers")
        fields["quartiles"] = tuple(pair)
    fields["parts"] = _object("parts", fields.get("parts", {}))
    return LatencyEntry(**fields)


def _constant(value: object) -> Constant:
    fields = _object("constant", value)
    if set(fields) != {"name", "value", "unit", "mark", "source"}:
        raise TreeError(f"constant: expected the keys name, value, unit, mark and source, got {sorted(fields)}")
    return Constant(**fields)


def _list(value: dict[str, object], name: str) -> list[object]:
    items = value[name]
    if not isinstance(items, list):
        raise TreeError(f"{name}: expected a list, got {type(items).__name__}")
    return items


def _object(name: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TreeError(f"{name}: expected an object, got {type(value).__name__}")
    return value


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise TreeError(f"{name}: expected text, got {value!r}")
    return value
