"""Two runs, held against each other text by text: which is faster, by how much, and how sure that is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from draftwood.errors import RequestError
from draftwood.tools.lab.record import read_record
from draftwood.tools.lab.rows import read_rows
from draftwood.tools.lab.runner import is_plain, median_seconds
from draftwood.tools.lab.sections.turn import plain_of
from draftwood.tools.lab.spread import RESAMPLES


def compare(before: Path, after: Path) -> dict[str, Any]:
    """Every way that both measured on the same texts.

    ``faster`` is how much less time ``after`` takes a text, a share of ``before``'s, as a mean of logarithms over rows
    with its 95 % interval; ``gain`` is the same of the speed-up over each run's own plain decoding, which does not ask
    for equal machines.

    Raises:
        RequestError: no run, or none of their rows measure the same.
    """
    rows_a, rows_b = ({row["key"]: row for row in read_rows(folder)} for folder in (before, after))
    pairs: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for key in rows_a.keys() & rows_b.keys():
        for way, a, plain_a, b, plain_b in _both(rows_a[key], rows_b[key]):
            place = "/".join([rows_a[key]["section"], *_place(rows_a[key]["at"])])
            time = float(np.log(a / b))
            pairs.setdefault((place, way), []).append((time, time - float(np.log(plain_a / plain_b))))
    if not pairs:
        raise RequestError(f"report {before} {after}: no texts in common; compare runs of one suite")
    machines = [read_record(folder)["machines"] for folder in (before, after)]
    ways = [
        {"where": place, "way": way, "texts": len(found), "faster": _interval([f[0] for f in found]),
         "gain": _interval([f[1] for f in found])}
        for (place, way), found in sorted(pairs.items())
    ]  # fmt: skip
    same = machines[0][0]["name"] == machines[1][0]["name"]
    busy = sum(row["load"]["busy"] for rows in (rows_a, rows_b) for row in rows.values())
    return {"before": str(before), "after": str(after), "same_machine": same, "busy_rows": busy, "ways": ways}


def sentences(found: dict[str, Any]) -> Iterator[str]:
    """The comparison in plain words."""
    if not found["same_machine"]:
        yield "The runs are of different machines: only speed-ups over plain decoding compare."
    if found["busy_rows"]:
        yield f"{found['busy_rows']} rows were measured while others were busy: look at a quiet run before deciding."
    for one in found["ways"]:
        name = "faster" if found["same_machine"] or is_plain(one["way"]) else "gain"
        yield f"{one['where']}, {one['way']}: {_said(one[name], name)} ({one['texts']} texts)"


def _said(interval: list[float], name: str) -> str:
    value, low, high = (100 * part for part in interval)
    what = "time a text" if name == "faster" else "speed-up over plain decoding"
    spans = f"95 % interval {low:+.1f} to {high:+.1f} %"
    if low <= 0 <= high:
        return f"no difference that the rows can show, {value:+.1f} %, {spans}"
    better = "faster" if value > 0 else "slower"
    return f"{abs(value):.1f} % {better} by {what}, {spans}"


def _both(a: dict[str, Any], b: dict[str, Any]) -> Iterator[tuple[str, float, float, float, float]]:
    """Ways of the same texts: seconds of both runs, and of plain decoding with the same bundle in each."""
    texts_a, texts_b = ([*row["found"].get("turns", [row["found"]])] for row in (a, b))
    for one, other in zip(texts_a, texts_b, strict=False):
        ways_a, ways_b = one.get("ways", {}), other.get("ways", {})
        for way in ways_a.keys() & ways_b.keys():
            plain = plain_of(way, ways_a)
            sides = ways_a[way], ways_a[plain], ways_b[way], ways_b[plain]
            if all(side["steps"] for side in sides):
                seconds = [median_seconds(side) for side in sides]
                yield way, seconds[0], seconds[1], seconds[2], seconds[3]


def _place(at: dict[str, Any]) -> list[str]:
    """What a figure is of: all that tells rows apart, but the text."""
    return [str(value) for name, value in at.items() if name not in ("conversation", "text")]


def _interval(logarithms: list[float]) -> list[float]:
    values_N = np.array(logarithms)
    picked = np.random.default_rng(0).integers(0, len(values_N), (RESAMPLES, len(values_N)))
    low, high = np.percentile(values_N[picked].mean(1), (2.5, 97.5))
    return [float(np.expm1(part)) for part in (values_N.mean(), low, high)]
