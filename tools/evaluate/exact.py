"""Which texts of a run were not the plain ones, wherever its rows hold them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple


class Text(NamedTuple):
    """One text decoded one way, and the key of its row."""

    key: str
    way: str
    figures: dict[str, Any]


def decoded(rows: Sequence[dict[str, Any]]) -> Iterator[Text]:
    """Every text that was decoded beside a plain one."""
    for row in rows:
        for held in row["found"].get("turns", [row["found"]]):
            for way, figures in held.get("ways", {}).items():
                if way != "plain":
                    yield Text(row["key"], way, figures)


def differences(rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Where texts part from the plain ones; one that says no more than that is no tie."""
    for text in decoded(rows):
        if not text.figures["equal"]:
            yield {"tie": False, **text.figures.get("difference", {}), "key": text.key, "way": text.way}
