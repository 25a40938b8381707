"""A GE graph of many blocks from the trace of a few (`draftwood.compiler.steps.short`), as torchair converts it.

A converted trace is a straight line: what stands between two marks is one block. Its operators are copied for every
block of its kind, with that block's weights and caches. Inputs and outputs of all blocks together are cut and joined
outside of the blocks (`draftwood.compiler.ge.growth`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from draftwood.compiler.ge.converters import BORDER_NUMBER, BORDER_SIDE
from draftwood.compiler.ge.graph import tensor_of
from draftwood.compiler.ge.growth import BlockGrowth, copied
from draftwood.compiler.steps.short import ShortStep, Unlike, numbered
from draftwood.compiler.steps.step import Step

# The place of an operator: a block's number, or one of these.
_BEFORE, _AFTER = -1, -2


class Converted(NamedTuple):
    """A graph (``GraphDef``), and which of its operators are inputs and parameters, by their names in
    signature and module."""

    graph: Any
    inputs: dict[str, str]
    parameters: dict[str, str]


def stamp(
    graph: Any, short: ShortStep, step: Step, inputs: Mapping[str, str], parameters: Mapping[str, str]
) -> Converted:
    """The graph of ``step`` from that of the same step of its decoder cut short.

    ``inputs`` and ``parameters`` name the placeholders of the short one. Constants among its placeholders hold their
    values.

    Raises:
        Unlike: an operator outside of the blocks is none of those whose sizes are known to grow.
    """
    stamping = _GeStamp(graph, short, step, {**inputs, **parameters})
    return Converted(stamping.graph(), stamping.known(inputs), stamping.known(parameters))


class _GeStamp:
    """One graph being made."""

    def __init__(self, graph: Any, short: ShortStep, step: Step, given: Mapping[str, str]) -> None:
        self.old, self.short, self.step, self.given = graph, short.short, step, given
        self.growth = BlockGrowth(graph, len(self.short.blocks), self.short.source)
        self.ops = {op.name: op for op in graph.op}
        self.borders = {(op.attr[BORDER_NUMBER].i, op.attr[BORDER_SIDE].i): op for op in graph.op if _is_border(op)}
        # Placeholders stand first.
        last = max(i for i, op in enumerate(graph.op) if op.name in given)
        self.placeholders = list(graph.op)[: last + 1]
        self.place = _places(graph, self.growth.few, {op.name for op in self.placeholders if op.type == "Const"})
        self.new: list[Any] = []
        # What is passed into every block and out of the last one, by side.
        self.passed: list[dict[int, str]] = []
        self.grown = self._grown(short.step)

    def graph(self) -> Any:
        self._placeholders(self.placeholders)
        by_place: dict[int, list[Any]] = {}
        for op in list(self.old.op)[len(self.placeholders) :]:
            if not _is_border(op):
                by_place.setdefault(self.place[op.name], []).append(op)
        for op in by_place.get(_BEFORE, ()):
            self._outside(op)
        self.passed.append({side: self._ref(op.input[0]) for (n, side), op in self.borders.items() if n == 0})
        for number, at in enumerate(self.short.source):
            for op in by_place[at]:
                self._copy(op, number, at)
            left = {side: op for (n, side), op in self.borders.items() if n == at + 1}
            self.passed.append({side: self._ref(op.input[0], number, at) for side, op in left.items()})
        for op in by_place[_AFTER]:
            self._after(op)
        graph = copied(self.old)
        del graph.op[:]
        graph.op.extend(self.new)
        return graph

    def known(self, placeholders: Mapping[str, str]) -> dict[str, str]:
        """Placeholders of the new graph; those of blocks have the names that they will have."""
        known: dict[str, str] = {}
        for placeholder, name in placeholders.items():
            if parts := numbered(name):
                names = [f"{parts[1]}{n}{parts[3]}" for n, at in enumerate(self.short.source) if at == int(parts[2])]
                known |= dict(zip(names, names, strict=True))
            else:
                known[placeholder] = name
        return known

    def _grown(self, traced: Step) -> set[str]:
        """The inputs whose first axis has a part for each block."""
        specs = {spec.name: spec for spec in self.step.signature.inputs}
        unlike = [spec for spec in traced.signature.inputs if spec.name in specs and specs[spec.name] != spec]
        for spec in unlike:
            if (spec.shape[0], specs[spec.name].shape[0]) != (self.growth.few, self.growth.all):
                raise Unlike(f"input {spec.name}: {spec.shape} of few blocks, {specs[spec.name].shape} of all")
        return {spec.name for spec in unlike}

    def _placeholders(self, ops: list[Any]) -> None:
        """Inputs and weights in their order; those of blocks that follow each other become those of all blocks."""
        run: list[Any] = []
        for op in [*ops, None]:
            if op is not None and self._block_of(op) >= 0:
                run.append(op)
                continue
            for number, at in enumerate(self.short.source):
                for member in run:
                    if self._block_of(member) == at:
                        self._placeholder(member, number)
            run = []
            if op is not None:
                self.new.append(copied(op))
                if self.given.get(op.name) in self.grown:
                    self.growth.give(self.new[-1])

    def _block_of(self, op: Any) -> int:
        parts = numbered(self.given.get(op.name))
        return int(parts[2]) if parts else self.place[op.name]

    def _placeholder(self, op: Any, number: int) -> None:
        parts, new = numbered(self.given.get(op.name)), copied(op)
        if parts:
            new.name = f"{parts[1]}{number}{parts[3]}"
        elif tensor_of(op.attr["value"].t).numel() > 1:  # it may differ from block to block
            raise Unlike(f"{op.name}: a constant of block {self.place[op.name]}")
        else:
            new.name = f"{op.name}.{number}"
        self.new.append(new)

    def _copy(self, op: Any, number: int, at: int) -> None:
        """An operator of block ``number``, a copy of ``at``."""
        new = copied(op)
        new.name = f"{op.name}.{number}"
        for place, text in enumerate(op.input):
            new.input[place] = self._ref(text, number, at)
        self.new.append(new)

    def _ref(self, text: str, number: int = -1, at: int = -1) -> str:
        """The new value of an old one, as block ``number``, a copy of ``at``, sees it; or as what is outside does."""
        name, _, output = text.rpartition(":")
        if not name:
            return text
        op = self.ops[name]
        if _is_border(op):
            block, side = op.attr[BORDER_NUMBER].i, op.attr[BORDER_SIDE].i
            if number < 0:
                return self.passed[self.short.blocks[block] if block < self.growth.few else self.growth.all][side]
            assert block == at, f"{text}: a block reads what enters another"
            return self.passed[number][side]
        if (parts := numbered(self.given.get(name))) is not None:
            block = number if number >= 0 else self.short.blocks[int(parts[2])]
            return f"{parts[1]}{block}{parts[3]}:{output}"
        if name in self.growth.cuts:
            return self._part(name, int(output), number, at)
        place = self.place[name]
        if place < 0:
            return text
        if number >= 0 and place not in (at, 0):
            raise Unlike(f"{text}: block {at} reads what block {place} has computed")
        block = number if place == at else self.short.blocks[place]
        return f"{name}.{block}:{output}"

    def _part(self, name: str, output: int, number: int, at: int) -> str:
        width = self.growth.cuts[name]
        if number < 0 or output // width != at:
            raise Unlike(f"{name}:{output}: a part of one block is read elsewhere")
        return f"{name}:{number * width + output % width}"

    def _after(self, op: Any) -> None:
        """An operator after the blocks; one that joins values of all of the few gets those of all."""
        owners = [self.place[text.rpartition(":")[0]] for text in op.input if text]
        if not self.growth.joins(op, owners):
            self._outside(op)
            return
        new = copied(op)
        inputs = self.growth.join(op, new)
        new.input[:] = [self._ref(text, number, self.short.source[number]) for number, text in inputs]
        self.new.append(new)

    def _outside(self, op: Any) -> None:
        """An operator of no block."""
        new = copied(op)
        new.input[:] = [self._ref(text) for text in op.input]
        self.growth.grow(op, new)
        self.new.append(new)


def _is_border(op: Any) -> bool:
    return BORDER_NUMBER in op.attr


def _places(graph: Any, few: int, tables: Collection[str]) -> dict[str, int]:
    """Every operator's block among the few, or whether it stands before or after all of them.

    A table that only one block reads is that block's, though all tables stand first.
    """
    places: dict[str, int] = {}
    readers: dict[str, set[int]] = {table: set() for table in tables}
    now = _BEFORE
    for op in graph.op:
        if _is_border(op):
            now = op.attr[BORDER_NUMBER].i if op.attr[BORDER_NUMBER].i < few else _AFTER
        places[op.name] = now
        for text in op.input:
            readers.get(text.rpartition(":")[0], set()).add(now)
    return places | {table: where.pop() for table, where in readers.items() if len(where) == 1 and min(where) >= 0}
