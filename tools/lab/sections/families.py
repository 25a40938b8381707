"""Turns by task family: FastEagle's table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from draftwood.tools.lab.runner import is_plain
from draftwood.tools.lab.section import Block, Table
from draftwood.tools.lab.sections.turn import Turn, total_speedup
from draftwood.tools.lab.spread import mean


def show(turns: list[Turn]) -> Iterator[Block]:
    """Speed-up and accept length by family."""
    groups: dict[tuple[Any, ...], list[Turn]] = {}
    for turn in turns:
        if not is_plain(turn.way):
            groups.setdefault((turn.source, turn.size, turn.temperature, turn.way), []).append(turn)
    lines = []
    for place, own in sorted(groups.items()):
        accepted = mean([n for turn in own for n in turn.figures["accepted"]])
        lines.append([*place, len(own), total_speedup(own), accepted])
    columns = ("family", "size", "temperature", "way", "turns", "speed-up (95 %)", "accept length (95 %)")
    yield Table("By task family", columns, lines)
