"""Operators outside of a graph's blocks that cut or join what all blocks get or give, from few blocks to many.

Such a value has a part for each block along one axis. If an operator's constants or descriptions hold sizes along that
axis, the size for the few blocks becomes that for all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftwood.compiler.ge.graph import list_ports, tensor_of
from draftwood.compiler.steps.short import Unlike

# Operators whose result has the parts along the same axis as what they read, if they do something along a later one.
_ALONG = ("GatherV2", "Identity", "Cast", "Squeeze", "Unsqueeze", "ConcatV2D", "SplitV")
_JOINS = ("ConcatV2D", "ConcatD")


class BlockParts(NamedTuple):
    """A value with a part for each block: along which axis, and the product of the sizes before it."""

    axis: int
    before: int = 1


class BlockGrowth:
    """The operators of one graph (``OpDef``) that are no block's.

    Args:
        old: the graph of the few.
        few: how many blocks it has.
        source: for every block of the new graph, the one of the few that it is like.
    """

    def __init__(self, old: Any, few: int, source: Sequence[int]) -> None:
        self.few, self.all, self._source = few, len(source), source
        self._ops = {op.name: op for op in old.op}
        self._reads = Counter(text.rpartition(":")[0] for op in old.op for text in op.input)
        # Values with parts; cuts along the parts, and how many outputs each block has of them.
        self._parts: dict[str, BlockParts] = {}
        self.cuts: dict[str, int] = {}
        self._made: dict[str, Any] = {}

    def give(self, op: Any) -> None:
        """An input whose first axis has a part for each block."""
        self._parts[f"{op.name}:0"] = BlockParts(0)
        for desc in (*op.input_desc, *op.output_desc):
            desc.shape.dim[0] = self.all
            desc.attr.pop("_meta", None)

    def grow(self, op: Any, new: Any) -> None:
        """Makes ``new``, a copy of the few's ``op``, that of all blocks."""
        read = [self._parts[text] for text in op.input if text in self._parts]
        for text, desc in zip(op.input, new.input_desc, strict=False):
            if text in self._parts and desc.HasField("shape"):
                axis = self._parts[text].axis
                desc.shape.dim[axis] = desc.shape.dim[axis] // self.few * self.all
        if not read or op.type == "NetOutput":
            self._put(new, {})
        elif any(other != read[0] for other in read):
            raise Unlike(f"{op.name}: reads parts along several axes")
        else:
            rules = {"Reshape": self._reshaped, "Transpose": self._transposed, "SplitV": self._cut}
            self._put(new, rules.get(op.type, self._along)(op, new, read[0]))

    def joins(self, op: Any, owners: Sequence[int]) -> bool:
        """Whether an operator joins equally many values of each of the few; ``owners`` are the blocks of its inputs."""
        width = len(owners) // self.few
        return op.type in _JOINS and list(owners) == [at for at in range(self.few) for _ in range(width)]

    def join(self, op: Any, new: Any) -> list[tuple[int, str]]:
        """Makes ``new`` a join of as many values of every block; its inputs are a block and what it is of the few."""
        if op.attr["concat_dim"].i != 0:
            raise Unlike(f"{op.name}: joins the blocks along another axis than the first")
        places, width = self._places(len(op.input))
        _repeat(new, new.input_desc, op.input_desc, places)
        new.attr["N"].i = len(places)
        self._put(new, {0: BlockParts(0)})
        return [(number // width, op.input[place]) for number, place in enumerate(places)]

    def _places(self, ports: int) -> tuple[list[int], int]:
        """The port among the few blocks for every port of all blocks, and the number of ports of a block."""
        width = ports // self.few
        return [at * width + i for at in self._source for i in range(width)], width

    def _put(self, op: Any, parts: Mapping[int, BlockParts]) -> None:
        if parts:
            for desc in op.output_desc:
                desc.attr.pop("_meta", None)
        self._made[op.name] = op
        self._parts |= {f"{op.name}:{output}": each for output, each in parts.items()}

    def _reshaped(self, op: Any, new: Any, parts: BlockParts) -> dict[int, BlockParts]:
        sizes = self._operand(op, 1).tolist()
        axes = [i for i in range(len(sizes)) if prod(sizes[:i]) == parts.before and sizes[i] % self.few == 0]
        if not axes:
            raise Unlike(f"{op.name}: its parts are along no axis of {sizes}")
        axis = axes[-1]
        sizes[axis] = sizes[axis] // self.few * self.all
        self._operate(op, new, 1, sizes)
        return {0: BlockParts(axis, parts.before)}

    def _transposed(self, op: Any, new: Any, parts: BlockParts) -> dict[int, BlockParts]:
        order = self._operand(op, 1).tolist()
        axis = order.index(parts.axis)
        sizes = self._sizes(op.input[0])
        return {0: BlockParts(axis, prod(sizes[i] for i in order[:axis]))}

    def _sizes(self, text: str) -> list[int]:
        """The sizes of the few blocks' value, which a reshape has made."""
        op = self._ops[text.rpartition(":")[0]]
        if op.type != "Reshape":
            raise Unlike(f"{text}: its sizes are not known")
        sizes: list[int] = self._operand(op, 1).tolist()
        return sizes

    def _cut(self, op: Any, new: Any, parts: BlockParts) -> dict[int, BlockParts]:
        """A cut along the parts gives each block its own; along another axis, every piece has a part for each."""
        if self._axis(op) != parts.axis:
            return self._along(op, new, parts)
        sizes = self._operand(op, 1).tolist()
        if len(sizes) % self.few or len(set(sizes)) > 1:
            raise Unlike(f"{op.name}: cuts {self.few} blocks into {sizes}")
        places, width = self._places(len(sizes))
        self._operate(op, new, 1, sizes[:1] * len(places))
        new.attr["num_split"].i = len(places)
        _repeat(new, new.output_desc, op.output_desc, places)
        for desc in new.output_desc:
            desc.attr.pop("_meta", None)
        self.cuts[op.name] = width
        return {}

    def _along(self, op: Any, new: Any, parts: BlockParts) -> dict[int, BlockParts]:
        """An operator along another axis; what it joins to the parts has one for each block, too."""
        axis = self._axis(op)
        if op.type not in _ALONG or (axis is not None and not parts.axis < axis):
            raise Unlike(f"{op.name}: a {op.type} of values with a part for each block")
        if op.type == "ConcatV2D":
            for place, text in enumerate(op.input):
                if text not in self._parts:
                    self._filled(new, place, text)
        return dict.fromkeys(range(len(op.output_desc)), parts)

    def _axis(self, op: Any) -> int | None:
        """The first axis along which an operator does something; None if there is none."""
        if op.type in ("GatherV2", "SplitV"):
            return int(self._operand(op, 2))
        if op.type == "ConcatV2D":
            return int(op.attr["concat_dim"].i)
        axes = op.attr["axis" if op.type == "Squeeze" else "axes"].list.i if op.type.endswith("queeze") else ()
        return min(axes, default=None)

    def _filled(self, new: Any, place: int, text: str) -> None:
        """A constant of one number that is joined to the parts."""
        fill = self._ops[text.rpartition(":")[0]]
        sizes = self._operand(fill, 0).tolist() if fill.type == "Fill" else []
        if not sizes or sizes[0] != self.few:
            raise Unlike(f"{new.name}: joins {text}")
        self._operate(fill, self._made[fill.name], 0, [self.all, *sizes[1:]])

    def _operand(self, op: Any, place: int) -> Tensor:
        constant = self._ops[op.input[place].rpartition(":")[0]]
        if constant.type != "Const":
            raise Unlike(f"{op.name}: operand {place} is no constant")
        return tensor_of(constant.attr["value"].t)

    def _operate(self, op: Any, new: Any, place: int, values: Sequence[int]) -> None:
        """Gives ``new`` another constant operand than ``op`` has."""
        name = op.input[place].rpartition(":")[0]
        if self._reads[name] > 1:
            raise Unlike(f"{name}: a constant of several operators")
        const = self._made[name]
        tensor = const.attr["value"].t
        tensor.data = torch.tensor(values, dtype=tensor_of(tensor).dtype).numpy().tobytes()
        for desc in (tensor.desc, *const.output_desc, new.input_desc[place]):
            desc.shape.dim[:] = [len(values)]
        const.attr.pop("_readable_value", None)


def copied(message: Any) -> Any:
    """Another message of the same content."""
    new = type(message)()
    new.CopyFrom(message)
    return new


def _repeat(op: Any, ports: Any, olds: Sequence[Any], places: Iterable[int]) -> None:
    """Ports of a list, numbered anew, each like the old one at its place."""
    stem = olds[0].name.rstrip("0123456789")
    fresh = [copied(olds[place]) for place in places]
    for number, port in enumerate(fresh):
        port.name = f"{stem}{number}"
    del ports[:]
    ports.extend(fresh)
    list_ports(op)
