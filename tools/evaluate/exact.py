"""Which texts of a run were not the plain ones, wherever its rows hold them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from draftwood.tools.evaluate.protocol import is_plain


class Text(NamedTuple):
    """One text decoded one way, and the key of its row."""

    key: str
    way: str
    figures: dict[str, Any]


def decoded(rows: Sequence[dict[str, Any]]) -> Iterator[Text]:
    """Every text that was decoded beside a plain one, other plain ones left out."""
    return (text for text in _all(rows) if not is_plain(text.way))


def _all(rows: Sequence[dict[str, Any]]) -> Iterator[Text]:
    for row in rows:
        for held in row["found"].get("turns", [row["found"]]):
            for way, figures in held.get("ways", {}).items():
                yield Text(row["key"], way, figures)


def differences(rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Where texts part from the first plain one, plain ones of other bundles too; no more said is no tie."""
    for text in _all(rows):
        if not text.figures["equal"]:
            yield {"tie": False, **text.figures.get("difference", {}), "key": text.key, "way": text.way}
