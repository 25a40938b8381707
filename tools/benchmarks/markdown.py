"""A run as Markdown and the pictures that it links to: docs/measured.md was written by this and not by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

from draftwood.errors import RequestError
from draftwood.files import write_whole
from draftwood.tools.benchmarks import draw
from draftwood.tools.benchmarks.contents import Contents
from draftwood.tools.benchmarks.section import Block, Figure, Table

TEMPLATE = Path(__file__).parent / "measured.md.jinja"
PAGE, PICTURES = "report.md", "figures"
# Names come from prompt files: none becomes a column, a link or HTML.
PLAIN = str.maketrans({"\\": r"\\", "|": r"\|", "[": r"\[", "<": "&lt;", "&": "&amp;"})


def write_report(report: Contents, folder: Path) -> tuple[Path, list[Path]]:
    """Writes the run as it is now into its folder; returns the page and its pictures.

    Raises:
        RequestError: the folder cannot be written.
    """
    page, blocks = folder / PAGE, [block for chapter in report.chapters for block in chapter.blocks]
    figures = [block for block in (report.picture, *blocks) if isinstance(block, Figure)]
    try:
        (folder / PICTURES).mkdir(exist_ok=True)
        drawn = [draw.save(figure.draw, figure.size, folder / PICTURES / f"{figure.name}.png") for figure in figures]
        write_whole(page, markdown(report).encode())
    except OSError as error:
        raise RequestError(
            f"{folder}: cannot be written: {error.strerror}; copy the run to a folder of yours"
        ) from error
    return page, drawn


def tables_of(report: Contents) -> list[dict[str, Any]]:
    """The run's tables as plain values; a figure with an interval is value, low and high."""
    return [
        {"section": chapter.section.name, "title": block.title, "columns": block.columns, "lines": block.lines}
        for chapter in report.chapters
        for block in chapter.blocks
        if isinstance(block, Table)
    ]


def markdown(report: Contents) -> str:
    """The page's text."""
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    return template.render(report=report, record=report.record, text=_text)


def _text(block: Block) -> str:
    if isinstance(block, str):
        return _plain(block)
    if isinstance(block, Figure):
        lines = [f"### {block.title}", f"![{block.title}]({PICTURES}/{block.name}.png)"]
        return "\n\n".join([*lines, *filter(None, [block.note])])
    lines = [_line(block.columns), "|" + "---|" * len(block.columns), *map(_line, block.lines)]
    return "\n\n".join([f"### {block.title}", "\n".join(lines), *filter(None, [block.note])])


def _line(cells: Sequence[object]) -> str:
    return "| " + " | ".join(map(_cell, cells)) + " |"


def _cell(value: object) -> str:
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else _plain(str(value))


def _plain(text: str) -> str:
    return " ".join(text.split()).translate(PLAIN)
