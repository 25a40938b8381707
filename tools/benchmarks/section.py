"""A section: the tasks it asks for, how one is measured, and how rows are shown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from draftwood.tools.benchmarks.suite import SectionSettings, Suite

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

    from draftwood.manifest import Manifest
    from draftwood.tools.benchmarks.open_bundles import Lab

Row = dict[str, Any]
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Task:
    """One row to be measured: its section, and what tells it from the section's others."""

    section: str
    at: dict[str, Any]

    @property
    def key(self) -> str:
        """The row's name; two rows of a run never share one."""
        return "/".join([self.section, *(str(value) for value in self.at.values())])


@dataclass(frozen=True, slots=True)
class Table:
    """Figures by line."""

    title: str
    columns: tuple[str, ...]
    lines: Sequence[Sequence[Any]]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Figure:
    """A picture: ``draw`` puts it on a canvas of matplotlib. ``name`` is that of its file."""

    name: str
    title: str
    draw: Callable[[Canvas], None]
    size: tuple[float, float] = (7.2, 3.4)
    note: str = ""


Block = Table | Figure | str


def gathered(items: Iterable[Item], key: Callable[[Item], tuple[Any, ...]]) -> dict[tuple[Any, ...], list[Item]]:
    """Items by what they have in common, in their order."""
    groups: dict[tuple[Any, ...], list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def grouped(rows: Iterable[Row], *of: str) -> dict[tuple[Any, ...], list[Row]]:
    """Rows by what tells them apart."""
    return gathered(rows, lambda row: tuple(row["at"][name] for name in of))


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A part of the evaluation. ``source`` names what it repeats: a paper, or ``Draftwood``."""

    name: str
    title: str
    question: str
    source: str
    tasks: Callable[[SectionSettings, Suite], Iterable[Task]]
    # Opens and warms up what `measure` needs; none of it is measured.
    prepare: Callable[[Task, SectionSettings, Lab], None] = lambda task, ask, lab: None
    measure: Callable[[Task, SectionSettings, Lab], dict[str, Any]]
    show: Callable[[list[Row]], Iterator[Block]]
    # Whether it can measure a bundle.
    takes: Callable[[Manifest], bool] = lambda manifest: True
    # Whether the texts of all bundles are compared with each other.
    one_text: bool = False
    # Whether other programs read the teacher's checkpoint.
    needs_checkpoint: bool = False
