"""One event per step of a decoding run: written down, read back, summed up, shown in Perfetto."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from draftwood.errors import RequestError
from draftwood.files import read_regular, write_whole
from draftwood.manifest import DAMAGED
from draftwood.runtime.policy import Expected
from draftwood.runtime.speculation.step import Outcome

FORMAT = "draftwood.trace"
VERSION = 1
# Thirty years; nanoseconds of it still fit int64.
_LONGEST_US = 1e15

StepKind = Literal["prefill", "decode", "verify"]


class StepEvent(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The record of one step and the times of its parts; the four times add up to the whole step.

    Raises:
        ValueError: a time that is negative, beyond thirty years, or NaN.
    """

    kind: StepKind
    # Count of steps before this one in the run.
    step: int
    gear: str
    # Committed length before the step, in tokens.
    position: int
    # Rows of the graph that ran: T of a tree, the chunk of a prefill.
    rows: int
    # Tokens gained, the bonus counted; of a prefill the number of prompt tokens.
    accepted: int
    # Rank path that the teacher accepted; empty if none, or if nothing was drafted.
    path: tuple[int, ...]
    # Tokens gained, in order.
    tokens: tuple[int, ...]
    # The drafter's probability of its best first candidate; None if nothing was drafted.
    confidence: float | None = None
    # Since the origin of the run's clock.
    start_us: float
    draft_us: float
    verify_us: float
    accept_us: float
    # The rest of the step, in none of the three above.
    host_us: float
    # The last gained token's rank among the candidates at the path's end, if the drafter's list is known; past its end,
    # if the token is none of them.
    rank: int | None = None
    # The gain that the policy expected of the step, if it had an opinion.
    expected_tokens: float | None = None
    expected_us: float | None = None
    # How many invariants of its tree and caches the step was held to; None if no engine for comparison ran.
    invariants: int | None = None

    @classmethod
    def of(
        cls, outcome: Outcome, *, step: int, start_us: float, host_us: float = 0.0, expected: Expected | None = None
    ) -> StepEvent:
        """The line of a step in the file: the step's record, and when it was in the run."""
        return cls(
            kind="verify" if outcome.gear.draft else "decode",
            step=step,
            gear=outcome.gear.name,
            position=outcome.length,
            rows=outcome.rows,
            accepted=outcome.gained,
            path=outcome.path,
            tokens=outcome.tokens,
            confidence=outcome.confidence,
            start_us=start_us,
            draft_us=outcome.draft_us,
            verify_us=outcome.verify_us,
            accept_us=outcome.accept_us,
            host_us=host_us,
            rank=outcome.rank,
            expected_tokens=expected.tokens if expected else None,
            expected_us=expected.us if expected else None,
            invariants=outcome.invariants,
        )

    def __post_init__(self) -> None:
        # JSON has no NaN or infinity, so such a trace could be written but not read back.
        for name in ("start_us", "draft_us", "verify_us", "accept_us", "host_us"):
            if not 0 <= getattr(self, name) < _LONGEST_US:
                raise ValueError(f"{name}: expected a time from 0 to {_LONGEST_US:.0e} us, got {getattr(self, name)}")

    @property
    def total_us(self) -> float:
        """Wall time of the step."""
        return self.draft_us + self.verify_us + self.accept_us + self.host_us


class Trace:
    """The events of a run in the order of its steps, and facts of the run as a whole.

    Example:
        >>> trace = Trace({"bundle": "demo"})
        >>> trace.events
        ()
    """

    def __init__(self, meta: dict[str, Any] | None = None) -> None:
        """``meta``: anything JSON can hold, except under the keys ``format`` and ``version``."""
        self.meta = dict(meta or {})
        assert not self.meta.keys() & {"format", "version"}, "reserved for the header of the file"
        self._events: list[StepEvent] = []

    @property
    def events(self) -> tuple[StepEvent, ...]:
        """All events so far."""
        return tuple(self._events)

    def check_new(self) -> None:
        """Raises RequestError if it has the events of a text."""
        if self._events:
            raise RequestError("trace: has the events of another text; give each text a Trace of its own")

    def add(self, event: StepEvent) -> None:
        """Appends the event of the step that just ended."""
        self._events.append(event)

    def write(self, path: str | Path) -> None:
        """Writes JSON lines, a header and then one event a line; the file is whole or not there at all.

        Raises:
            RequestError: the file cannot be written.
        """
        header = {"format": FORMAT, "version": VERSION, **self.meta}
        _write(Path(path), msgspec.json.Encoder().encode_lines([header, *self._events]))

    @classmethod
    def read(cls, path: str | Path) -> Trace:
        """Reads a file of ``write``.

        Raises:
            RequestError: not a trace, one of another version, or a broken line; the message has its number.
        """
        path = Path(path)
        try:
            lines = read_regular(path).splitlines()
        except OSError as error:
            raise RequestError(f"{path}: cannot be read: {error.strerror}") from error
        trace = cls(_header(path, lines[0] if lines else b""))
        decoder = msgspec.json.Decoder(StepEvent)
        for number, line in enumerate(lines[1:], start=2):
            try:
                trace.add(decoder.decode(line))
            except DAMAGED as error:
                raise RequestError(f"{path}: line {number}: expected a step event, got: {error}") from error
        return trace

    def chrome(self, path: str | Path | None = None) -> dict[str, Any]:
        """The trace in the Chrome format, which Perfetto opens; also written to ``path`` if one is given.

        Every step is a span. It holds one span for each of draft, verify and accept that took time, laid end to end.
        The rest of the step is the host's. Times are in microseconds, whole nanoseconds.

        Raises:
            RequestError: the file cannot be written.
        """
        spans: list[dict[str, Any]] = []
        end_ns = 0
        for event in self._events:
            # Each time was rounded by itself, so steps back to back may seem to overlap by a nanosecond.
            spans += _spans(event, max(end_ns, round(event.start_us * 1000)))
            end_ns = max(end_ns, round((event.start_us + event.total_us) * 1000))
        chrome = {"traceEvents": spans, "displayTimeUnit": "ms", "otherData": self.meta}
        if path is not None:
            _write(Path(path), msgspec.json.encode(chrome))
        return chrome


def prompt_digest(ids: Sequence[int]) -> str:
    """A prompt's name in a trace: the first half of the SHA-256, in hex, over its token ids as int64."""
    return hashlib.sha256(np.array(ids, "<i8").tobytes()).hexdigest()[:32]


def form_of(path: str | Path) -> Literal["events", "chrome"]:
    """Which form a trace file of this name has: ``.jsonl`` events, ``.json`` (``.chrome.json``) Chrome.

    Raises:
        RequestError: any other suffix.
    """
    path = Path(path)
    forms: dict[str, Literal["events", "chrome"]] = {".jsonl": "events", ".json": "chrome"}
    if path.suffix not in forms:
        raise RequestError(
            f"{path}: expected a trace file name that ends in .jsonl (events) or "
            f".chrome.json (opens in Perfetto), got {path.suffix or 'no suffix'}"
        )
    return forms[path.suffix]


def save(trace: Trace, path: str | Path) -> None:
    """Writes a trace in the form that the file name asks for.

    Raises:
        RequestError: another suffix (see ``form_of``), or the file cannot be written.
    """
    if form_of(path) == "chrome":
        trace.chrome(path)
    else:
        trace.write(path)


def _header(path: Path, line: bytes) -> dict[str, Any]:
    try:
        header = msgspec.json.decode(line, type=dict[str, Any])
    except DAMAGED as error:
        raise RequestError(f"{path}: line 1: expected the header of a trace, got: {error}") from error
    named = (header.pop("format", None), header.pop("version", None))
    if named != (FORMAT, VERSION):
        raise RequestError(
            f"{path}: line 1: expected format {FORMAT!r}, version {VERSION}, got {named[0]!r}, {named[1]!r}; "
            "record the trace again with this version"
        )
    return header


def _spans(event: StepEvent, begin_ns: int) -> Iterator[dict[str, Any]]:
    # Edges are rounded, not lengths, so that the parts cannot stick out of the step.
    end_ns = max(begin_ns, round((event.start_us + event.total_us) * 1000))
    args = {
        "gear": event.gear,
        "accepted": event.accepted,
        "path": event.path,
        "step": event.step,
        "position": event.position,
        "rows": event.rows,
    }
    yield _span(f"{event.kind} {event.gear}", event.kind, begin_ns, end_ns, args)
    at_us, at_ns = event.start_us, begin_ns
    for part, part_us in (
        ("draft", event.draft_us),
        ("verify", event.verify_us),
        ("accept", event.accept_us),
    ):
        at_us += part_us
        next_ns = min(end_ns, max(at_ns, round(at_us * 1000)))
        if next_ns > at_ns:
            yield _span(part, "part", at_ns, next_ns, {})
        at_ns = next_ns


def _span(name: str, category: str, begin_ns: int, end_ns: int, args: dict[str, Any]) -> dict[str, Any]:
    times = {"ts": begin_ns / 1000, "dur": (end_ns - begin_ns) / 1000}
    return {"name": name, "cat": category, "ph": "X", **times, "pid": 1, "tid": 1, "args": args}


def _write(path: Path, content: bytes) -> None:
    try:
        write_whole(path, content)
    except OSError as error:
        raise RequestError(f"{path}: cannot be written: {error.strerror}") from error
