"""One self-contained page of a run, with its figures as files beside it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftwood.errors import RequestError
from draftwood.files import write_whole
from draftwood.tools.lab.report.contents import Contents, contents
from draftwood.tools.lab.report.pictures import render
from draftwood.tools.lab.rows import FILE
from draftwood.tools.lab.section import Figure, Table
from draftwood.tools.lab.spread import Interval

TEMPLATE = Path(__file__).parent / "page.html.jinja"
PAGE, PICTURES = "report.html", "figures"


def write_page(folder: Path) -> Path:
    """Draws the run as it is now; returns the page.

    Raises:
        RequestError: the folder holds no run, or cannot be written.
    """
    found = contents(folder)
    try:
        (folder / PICTURES).mkdir(exist_ok=True)
        page = folder / PAGE
        write_whole(page, html(found, folder / PICTURES).encode())
    except OSError as error:
        raise RequestError(
            f"{folder}: cannot be written: {error.strerror}; copy the run to a folder of yours"
        ) from error
    return page


def html(found: Contents, pictures: Path) -> str:
    """The page's text; writes the figures into ``pictures``."""
    import jinja2

    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    sources = Sources(found)
    chapters = [
        {
            "section": chapter.section,
            "rows": len(chapter.rows),
            "asked": chapter.asked,
            "busy": sum(row["load"]["busy"] for row in chapter.rows),
            "blocks": [_block(block, pictures, sources) for block in chapter.blocks],
        }
        for chapter in found.chapters
    ]
    numbers = [{"number": number, "source": sources.of(number.rows)} for number in found.numbers]
    overview = _block(found.picture, pictures, sources) if found.picture else None
    return template.render(
        record=found.record,
        rows=len(found.rows),
        complete=found.complete,
        busy=sum(row["load"]["busy"] for row in found.rows),
        seconds=sum(row["load"]["seconds"] for row in found.rows),
        numbers=numbers,
        overview=overview,
        chapters=chapters,
        sources=sources.found,
        file=FILE,
        command=found.record["commands"][0]["command"],
    )


class Sources:
    """Sets of rows that figures come from, each with an id and the lines at which it stands in the file."""

    def __init__(self, found: Contents) -> None:
        self._lines = {row["key"]: row["line"] for row in found.rows}
        self.found: dict[str, dict[str, Any]] = {}
        self._known: dict[tuple[str, ...], str] = {}

    def of(self, keys: Sequence[str]) -> str:
        """The id under which the page tells of these rows."""
        wanted = tuple(keys)
        if wanted not in self._known:
            name = f"rows-{len(self._known) + 1}"
            self._known[wanted] = name
            lines = sorted(self._lines[key] for key in wanted)
            self.found[name] = {"count": len(wanted), "lines": ranges(lines), "keys": _prefix(wanted)}
        return self._known[wanted]


def ranges(numbers: Sequence[int]) -> str:
    """``1-3, 7`` of ascending numbers."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in found)


def _prefix(keys: Sequence[str]) -> str:
    if len(keys) == 1:
        return keys[0]
    first, last = min(keys).split("/"), max(keys).split("/")
    return "/".join([*(a for a, b in zip(first, last, strict=False) if a == b), "..."])


def _block(block: Table | Figure | str, pictures: Path, sources: Sources) -> dict[str, Any]:
    if isinstance(block, str):
        return {"kind": "text", "text": block}
    if isinstance(block, Figure):
        svg = render(block, pictures)
        return {
            "kind": "figure",
            "figure": block,
            "svg": svg,
            "source": sources.of(block.rows),
            "count": len(block.rows),
        }
    lines = [
        {"cells": [_cell(value) for value in line], "source": sources.of(keys)}
        for line, keys in zip(block.lines, block.rows, strict=True)
    ]
    return {"kind": "table", "table": block, "lines": lines, "source": sources.of(_union(block.rows))}


def _union(rows: Sequence[Sequence[str]]) -> list[str]:
    return list(dict.fromkeys(key for keys in rows for key in keys))


def _cell(value: Any) -> dict[str, str | float | None]:
    """What is read, and the number that it is sorted by."""
    if isinstance(value, Interval):
        return {"text": str(value), "sort": value.value}
    if isinstance(value, bool) or value is None:
        return {"text": "-" if value is None else "yes" if value else "NO", "sort": None}
    if isinstance(value, int | float):
        return {"text": f"{value:g}" if isinstance(value, float) else str(value), "sort": float(value)}
    return {"text": str(value) if isinstance(value, str) else json.dumps(value), "sort": None}
