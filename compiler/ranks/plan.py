"""The plan of the split, said once: by the name of a layer, the part of its weight that each device holds, and the
joining of the parts.

Layers with the same name are split alike in every teacher and drafter. So a new family of teachers gets its split from
the names of its layers. Every device has all other tensors whole (norms, rotary tables, maps of ids). The split is
Megatron's (Shoeybi et al., 2019, arXiv 1909.08053): columns into attention and SwiGLU, rows out of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from draftwood.compiler.ranks.share import Share
from draftwood.compiler.teachers.config import TeacherConfig

# The units along a split axis: heads of ``head_dim`` rows, or rows one by one.
Unit = Literal["heads", "kv_heads", "rows"]


@dataclass(frozen=True, slots=True)
class Split:
    """How the weight of a layer is split.

    ``side`` is the split axis: of the layer's results or of its inputs. ``units`` are the sections that stand one after
    the other along it. Each is split by itself; sections of rows are equally long. ``joined`` says how the devices'
    results become one: not at all, since the next layer reads its own device's part; by adding them up; or side by
    side.
    """

    side: Literal["outputs", "inputs"]
    units: tuple[Unit, ...]
    joined: Literal["apart", "summed", "gathered"]


_COLUMNS = Split("outputs", ("rows",), "gathered")
# Rows of tokens.
TOKENS = Split("outputs", ("rows",), "summed")
SPLITS: dict[str, Split] = {
    "embed": TOKENS,
    "draft_embed": TOKENS,
    "qkv": Split("outputs", ("heads", "kv_heads", "kv_heads"), "apart"),
    "o": Split("inputs", ("heads",), "summed"),
    "gate_up": Split("outputs", ("rows", "rows"), "apart"),
    "down": Split("inputs", ("rows",), "summed"),
    # A mixture's experts, whose gate_up and down are split as those of an MLP; every device runs all of them.
    "experts": Split("inputs", ("rows",), "summed"),
    "lm_head": _COLUMNS,
    "draft_head": _COLUMNS,
    # A drafter's: states of the teacher to one hidden state, Medusa's residual blocks and output matrices.
    "fc": _COLUMNS,
    "proj": _COLUMNS,
    "blocks": _COLUMNS,
    "out": _COLUMNS,
}


def layer_of(name: str) -> tuple[str, str]:
    """(layer, kind) of a weight, such as ``layers.3.qkv`` and ``bias``; a matrix of its own is a layer's weight."""
    layer, _, kind = name.rpartition(".")
    return (layer, kind) if kind in ("weight", "bias") else (name, "weight")


def split_of(layer: str) -> Split | None:
    """The split of a layer by its whole name, such as ``layers.3.qkv`` or ``heads.0.blocks.1``."""
    words = [word for word in layer.split(".") if not word.isdecimal()]
    return SPLITS.get(words[-1]) if words else None


def cut(name: str, whole: Tensor, config: TeacherConfig, share: Share) -> Tensor:
    """A device's part of the weight or bias ``name``; ``config`` is of the block that it belongs to.

    Rows past the end are zeros, which add nothing to a sum; logits of such rows are dropped. A bias after a sum is the
    first device's alone.
    """
    layer, kind = layer_of(name)
    split = split_of(layer)
    if split is None:
        return whole
    if kind == "bias" and split.side == "inputs":
        return whole if share.rank == 0 else torch.zeros_like(whole)
    axis = -1 if kind == "bias" or split.side == "inputs" else -2
    widths = {"heads": config.head_dim, "kv_heads": config.head_dim, "rows": 1}
    counts = {"heads": config.heads, "kv_heads": config.kv_heads}
    by_heads = sum(counts[unit] * widths[unit] for unit in split.units if unit != "rows")
    rows = (whole.shape[axis] - by_heads) // max(split.units.count("rows"), 1)
    sections = [(counts.get(unit, rows), widths[unit]) for unit in split.units]
    pieces = whole.split([units * width for units, width in sections], axis)
    return torch.cat([_part(piece, axis, *size, share) for piece, size in zip(pieces, sections, strict=True)], axis)


def _part(piece: Tensor, axis: int, units: int, width: int, share: Share) -> Tensor:
    first, count = share.of(units)
    length = max(min(count, units - first), 0)
    part = piece.narrow(axis, min(first, units) * width, length * width)
    if length == count:
        return part
    shape = list(part.shape)
    shape[axis] = (count - length) * width
    return torch.cat((part, part.new_zeros(shape)), axis)


def join(name: str, parts: Sequence[Tensor], config: TeacherConfig, whole: Sequence[int]) -> Tensor:
    """The weight of shape ``whole`` that `cut` made these ``parts`` of, one a device."""
    merged = torch.zeros(tuple(whole), dtype=parts[0].dtype)
    order = torch.arange(merged.numel(), dtype=torch.int64).view(merged.shape) + 1
    for rank, part in enumerate(parts):
        places = cut(name, order, config, Share(rank, len(parts)))
        merged.view(-1)[places[places > 0] - 1] = part[places > 0]
    return merged
