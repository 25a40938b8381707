"""A decoder cut short to one block of each kind: its trace says what the graph of all blocks is.

It holds the first block, one block of every kind, those whose entering states a drafter reads, and one that it does not
read. Its trace has marks between the blocks.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from copy import copy
from dataclasses import dataclass

from torch import nn

from draftwood.compiler.steps.step import Step
from draftwood.compiler.teachers.decoder import Decoder

# The number in a name of a block's weight or cache.
_WEIGHT = re.compile(r"((?:\w+\.)*decoder\.layers\.)(\d+)(\..*)")
_CACHE = re.compile(r"((?:settled_)?(?:key|value)_cache\.)(\d+)((?:\.out)?)")


class Unlike(Exception):
    """A trace folded a block's weights into a constant, so that another block's graph cannot be made of it."""


@dataclass(frozen=True, slots=True)
class Short:
    """A decoder of a few of another's blocks. ``blocks`` are their numbers there. For each block of the other,
    ``source`` is the place in ``blocks`` of one of its kind."""

    decoder: Decoder
    blocks: tuple[int, ...]
    source: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ShortStep:
    """A step of a short decoder."""

    short: Short
    step: Step


def shortened(decoder: Decoder) -> Short | None:
    """The short decoder over the same weights; None if it would save nothing."""
    kinds = [_kind(layer) for layer in decoder.layers]
    first = {kind: number for number, kind in reversed(list(enumerate(kinds))) if number}
    chosen = {0, *first.values(), *(number for number in decoder.aux_layers if number < len(kinds))}
    # A join of these states has fewer inputs than one of all blocks.
    others = [number for number in range(1, len(kinds)) if number not in decoder.aux_layers]
    if not others or len(chosen | {others[0]}) + 1 > len(kinds) // 2:
        return None
    numbers = tuple(sorted(chosen | {others[0]}))
    place = {kinds[number]: at for at, number in reversed(list(enumerate(numbers))) if number}
    source = tuple(numbers.index(n) if n in numbers else place[kind] for n, kind in enumerate(kinds))
    short = copy(decoder)
    short._modules = {**decoder._modules, "layers": nn.ModuleList(decoder.layers[number] for number in numbers)}
    short.config = copy(decoder.config)
    # Not by ``replace``: what else it says is of all blocks.
    object.__setattr__(short.config, "layers", len(numbers))
    short.aux_layers = tuple(len(numbers) if a == len(kinds) else numbers.index(a) for a in decoder.aux_layers)
    short.borders = True
    return Short(short, numbers, source)


def _kind(layer: nn.Module) -> Hashable:
    """Equal for two blocks whose graphs differ in their weights alone."""
    modules = tuple(
        (name, type(module), tuple(sorted((k, v) for k, v in vars(module).items() if isinstance(v, int | float | str))))
        for name, module in layer.named_modules()
    )
    return modules, tuple((name, value.shape, value.dtype) for name, value in layer.state_dict().items())


def numbered(name: str | None) -> re.Match[str] | None:
    """The parts of a name with a block's number in it."""
    return _WEIGHT.fullmatch(name or "") or _CACHE.fullmatch(name or "")
