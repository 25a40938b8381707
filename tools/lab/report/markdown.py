"""A run as Markdown: docs/measured.md is this, written by a command and not by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2

from draftwood.files import write_whole
from draftwood.tools.lab.report.contents import Contents, contents
from draftwood.tools.lab.section import Block, Figure, Table
from draftwood.tools.lab.spread import Interval

TEMPLATE = Path(__file__).parent / "measured.md.jinja"


def write_markdown(folder: Path) -> Path:
    """Writes the run's tables into ``report.md`` beside its page; RequestError where nothing was measured."""
    out = folder / "report.md"
    write_whole(out, markdown(contents(folder)).encode())
    return out


def figures_of(folder: Path) -> list[dict[str, Any]]:
    """The run's tables as plain values; a figure with an interval is value, low and high."""
    return [
        {"section": chapter.section.name, "title": block.title, "columns": block.columns, "lines": block.lines}
        for chapter in contents(folder).chapters
        for block in chapter.blocks
        if isinstance(block, Table)
    ]


def markdown(found: Contents) -> str:
    """The page's text."""
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    chapters = [
        {"section": chapter.section, "rows": len(chapter.rows), "blocks": [*filter(None, map(_text, chapter.blocks))]}
        for chapter in found.chapters
        if chapter.rows
    ]
    busy = sum(row["load"]["busy"] for row in found.rows)
    return template.render(
        record=found.record, rows=len(found.rows), busy=busy, numbers=found.numbers, chapters=chapters
    )


def _text(block: Block) -> str:
    if isinstance(block, str):
        return block
    if isinstance(block, Figure):
        return ""
    return _table(block)


def _table(table: Table) -> str:
    lines = [f"### {table.title}", "", _line(table.columns), "|" + "---|" * len(table.columns)]
    lines += [_line([_cell(value) for value in line]) for line in table.lines]
    return "\n".join([*lines, *(["", table.note] if table.note else [])])


def _line(cells: object) -> str:
    assert isinstance(cells, list | tuple)
    return "| " + " | ".join(str(cell).replace("|", "\\|").strip() for cell in cells) + " |"


def _cell(value: object) -> str:
    if isinstance(value, Interval) or not isinstance(value, float):
        return "-" if value is None else str(value)
    return f"{value:g}"
