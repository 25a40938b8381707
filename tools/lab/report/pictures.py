"""A figure as PNG and SVG files, and as SVG that stands inside a page and takes its colours."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

from draftwood.tools.lab.draw import INK, STYLE
from draftwood.tools.lab.section import Figure

DPI = 130


def render(figure: Figure, folder: Path) -> str:
    """Writes ``NAME.png`` and ``NAME.svg`` into ``folder``; returns the SVG for a page."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # drawn without a display
    from matplotlib.figure import Figure as Canvas

    style: Any = {**STYLE, "svg.hashsalt": figure.name}
    with rc_context(style):
        canvas = Canvas(figsize=figure.size, layout="constrained")
        FigureCanvasAgg(canvas)
        figure.draw(canvas)
        canvas.savefig(folder / f"{figure.name}.png", dpi=DPI, facecolor="white", metadata={"Software": None})
        drawn = io.StringIO()
        canvas.savefig(drawn, format="svg", metadata={"Date": None, "Creator": None})
    text = drawn.getvalue()
    (folder / f"{figure.name}.svg").write_text(text, encoding="utf-8")
    return inline(text, figure.name, figure.title)


def inline(svg: str, name: str, title: str) -> str:
    """An SVG without its header: ink is the page's, ids are its own, the size is the page's to choose."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = svg.replace(INK, "currentColor")
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'(url\(#|href="#)', rf"\g<1>{name}-", svg)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*" height="[^"]*"|(<svg[^>]*?) height="[^"]*"', r"\1\2", svg, count=1)
    svg = re.sub(r'<svg([^>]*?) width="[^"]*"', r"<svg\1", svg, count=1)
    return svg.replace("<svg", f'<svg role="img" aria-label="{title}"', 1)
