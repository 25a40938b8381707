"""A teacher in another precision than its files': one of plain numbers rounded to blocks or to W8A8, a packed one as it
is packed or requantised, one of W8A8 in packed blocks of eight bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Generic, Literal, TypeVar

import torch
from torch import Tensor

from draftwood.compiler.checkpoints.int8 import rounded
from draftwood.compiler.checkpoints.packed import Grouped
from draftwood.compiler.checkpoints.weight import Parts
from draftwood.compiler.teachers.checkpoint import Checkpoint
from draftwood.compiler.teachers.config import PackedLayer
from draftwood.compiler.teachers.quantised import SCALE, linear_layers
from draftwood.compiler.teachers.reader import WholeMatrix
from draftwood.compiler.teachers.rounding import HEAD, grouped, rounded_layers, whole_matrices
from draftwood.errors import RequestError
from draftwood.kernels.int4 import GROUPS, OUTPUTS, packed_words
from draftwood.kernels.nbits import BLOCK, packed_blocks

# O outputs, H inputs, G groups of inputs

ZERO, OFFSET, MINIMUM = "weight_zero", "weight_offset", "weight_minimum"
# With -head the output matrix is in W8A8, too.
Precision = Literal["exact", "nbits", "nbits8", "nbits-head", "w8a8", "w8a8-head"]
T = TypeVar("T")


def in_precision(checkpoint: Checkpoint, precision: Precision, npu: bool = False) -> Checkpoint:
    """The teacher, its linear layers kept in ``precision``, as the kernels of a CPU or an NPU read them.

    For a CPU, ``nbits`` keeps a layer as it is packed; one of plain numbers is rounded to four bits in blocks of 32
    inputs, as ``nbits8`` to eight. The output matrix has eight bits at least, and so has what is plain in a packed
    teacher. A W8A8 teacher's layers are kept in eight bits.

    ``w8a8`` rounds every linear layer but the output matrix, whatever it is kept in. Experts and routers stay the exact
    product in all of them. So does, as ``nbits``, a layer that mixes groups or whose groups are no multiple of 32
    inputs; on an NPU one that mixes bits, or has eight or plain numbers, with groups that are no multiple of 64 inputs,
    or with a number of outputs that is none of 64. On a CPU a layer of four and eight bits is kept in eight.

    Raises:
        RequestError: it has no layer that can be kept so.
    """
    if precision == "exact":
        return checkpoint
    if precision in ("nbits", "nbits8") and checkpoint.config.quantised and not npu:
        return _eight_bits(checkpoint)
    if precision in ("w8a8", "w8a8-head"):
        made = {layer: _requantised(checkpoint, layer) for layer in rounded_layers(checkpoint) if layer != HEAD}
        found = replace(checkpoint, config=replace(checkpoint.config, quantised=tuple(made)))
    else:
        scored = precision != "nbits-head" and not npu
        checkpoint = _untied(checkpoint) if scored else checkpoint
        whole = checkpoint.packed if npu else whole_matrices(checkpoint, 8 if precision == "nbits8" else 4)
        layers = [name for name in linear_layers(checkpoint.parts) if scored or name != HEAD]
        kept = [one for layer in layers if (one := _kept(checkpoint, layer, whole, npu))]
        made = {one.name: _weights(checkpoint, one, whole) for one in kept}
        found = replace(checkpoint, config=replace(checkpoint.config, packed=tuple(kept)))
    if not made or checkpoint.config.quantised or (npu and precision == "nbits8"):
        raise _refused(checkpoint, precision, npu)
    found = replace(found, parts=_with(checkpoint.parts, made))
    return _with_int8_head(found) if precision.endswith("-head") else found


def _refused(checkpoint: Checkpoint, precision: Precision, npu: bool) -> RequestError:
    if checkpoint.config.quantised:
        reason, way_out = "is in W8A8 as it is", "leave the option out, or for a CPU choose nbits"
    elif npu and precision == "nbits8":
        reason, way_out = "an NPU's kernel takes packed weights of four bits alone", "choose w8a8"
    elif npu:
        reason = f"has no matrix that is packed in four bits with groups of a multiple of {GROUPS[-1]} inputs"
        way_out = "choose w8a8, or leave the option out"
    else:
        reason, way_out = f"has no layer with groups of a multiple of {BLOCK} inputs", "leave the option out"
    return RequestError(f"--precision {precision}: {checkpoint.path}: {reason}; {way_out}")


def _untied(checkpoint: Checkpoint) -> Checkpoint:
    """The teacher with an output matrix of its own, which a tied one's embedding is rounded to."""
    embedding = checkpoint.parts["embed.weight"]
    if not checkpoint.config.tied or embedding.tensors[0][1][1] % BLOCK:
        return checkpoint
    parts = {**checkpoint.parts, f"{HEAD}.weight": embedding}
    return replace(checkpoint, config=replace(checkpoint.config, tied=False), parts=parts)


def _with_int8_head(checkpoint: Checkpoint) -> Checkpoint:
    """The teacher with its output matrix in W8A8; a tied one gets values of its own."""
    config, matrix = checkpoint.config, "embed" if checkpoint.config.tied else HEAD
    made = {f"{HEAD}.{kind}": part for kind, part in _requantised(checkpoint, matrix).items()}
    return replace(
        checkpoint,
        config=replace(config, tied=False, quantised=(*config.quantised, HEAD)),
        parts={name: part for name, part in checkpoint.parts.items() if name != f"{HEAD}.weight"} | made,
    )


def _eight_bits(checkpoint: Checkpoint) -> Checkpoint:
    """A W8A8 teacher with the same numbers in blocks."""
    layers, parts = checkpoint.config.quantised, dict(checkpoint.parts)
    for layer in layers:
        parts |= _in_blocks(layer, parts[f"{layer}.weight"], parts[f"{layer}.{SCALE}"])
    packed = tuple(PackedLayer(name=layer, bits=8, zeros=False) for layer in layers)
    return replace(checkpoint, config=replace(checkpoint.config, quantised=(), packed=packed), parts=parts)


def _in_blocks(layer: str, weight: Parts, scale: Parts) -> dict[str, Parts]:
    """For `draftwood.kernels.nbits`: an output's scale for each of its blocks."""
    inputs = weight.tensors[0][1][1]
    if inputs % BLOCK:
        raise RequestError(f"--precision nbits: {layer} has {inputs} inputs; expected a multiple of {BLOCK}")

    def whole(tensors: Sequence[Tensor]) -> Tensor:
        assert weight.combine
        # From two's complement to the distance from -128.
        return (weight.combine(tensors).t().contiguous().view(torch.uint8) ^ 128).unflatten(1, (-1, BLOCK))

    def scales(tensors: Sequence[Tensor]) -> Tensor:
        assert scale.combine
        return scale.combine(tensors)[:, None].repeat(1, inputs // BLOCK)

    return {
        f"{layer}.weight": Parts(weight.tensors, whole, torch.uint8),
        f"{layer}.{SCALE}": Parts(scale.tensors, scales, torch.float32),
    }


def _with(parts: Mapping[str, Parts], made: Mapping[str, Mapping[str, Parts]]) -> dict[str, Parts]:
    found: dict[str, Parts] = {}
    for name, part in parts.items():
        layer, _, kind = name.rpartition(".")
        if kind == "weight" and layer in made:
            found |= {f"{layer}.{what}": one for what, one in made[layer].items()}
        else:
            found[name] = part
    return found


def _requantised(checkpoint: Checkpoint, layer: str) -> dict[str, Parts]:
    """int8 [H, O] and scales [O] of the exact product."""

    made = _Once(lambda: rounded(checkpoint.weight(f"{layer}.weight")), SCALE)

    def weight(pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0].t().contiguous()

    def scale(pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[1].flatten()

    return {"weight": made.part("weight", weight, torch.int8), SCALE: made.part(SCALE, scale, torch.float32)}


class _Once(Generic[T]):
    """What several weights are made of, read for the first and let go behind the one that is written ``last``."""

    def __init__(self, read: Callable[[], T], last: str) -> None:
        self._read, self._last, self._held = read, last, list[T]()

    def part(self, name: str, of: Callable[[T], Tensor], kind: torch.dtype | None) -> Parts:
        return Parts((), partial(self._value, name, of), kind)

    def _value(self, name: str, of: Callable[[T], Tensor], _: Sequence[Tensor]) -> Tensor:
        if not self._held:
            self._held.append(self._read())
        value = of(self._held[0])
        if name == self._last:
            self._held.clear()
        return value


def _kept(checkpoint: Checkpoint, layer: str, whole: Mapping[str, WholeMatrix], npu: bool) -> PackedLayer | None:
    names = [name for name, _ in checkpoint.parts[f"{layer}.weight"].tensors]
    found = [whole[name] for name in names if name in whole]
    if len(found) < len(names):
        return None
    groups, widths = {one.shape[1] // one.groups for one in found}, {one.bits for one in found}
    inputs, bits = groups.pop(), max(widths)
    group = next((size for size in GROUPS if inputs % size == 0 and size < found[0].shape[1]), None) if npu else None
    fits = widths == {4} and group and sum(one.shape[0] for one in found) % OUTPUTS == 0
    if groups or not (fits if npu else inputs % BLOCK == 0):
        return None
    minimum = any(one.minimum for one in found)
    return PackedLayer(
        name=layer,
        bits=8 if bits == 8 else 4,
        # In eight bits those of four count from the middle, and a minimum takes up where others count from.
        zeros=(npu or not minimum) and not all(one.middle for one in found if one.bits == bits),
        minimum=minimum,
        group=group,
    )


_Made = dict[str, tuple[Callable[[Grouped], Tensor], Callable[[Tensor], Tensor], torch.dtype | None]]


def _weights(checkpoint: Checkpoint, layer: PackedLayer, whole: Mapping[str, WholeMatrix]) -> dict[str, Parts]:
    """What the kernel of the layer reads: of every matrix something by outputs, which is joined and then laid out."""
    part = checkpoint.parts[f"{layer.name}.weight"]
    join: Callable[[Sequence[Tensor]], Tensor] = part.combine or (lambda tensors: torch.cat(tuple(tensors)))

    def read() -> list[Grouped]:
        return _alike([grouped(checkpoint, name, whole[name]) for name, _ in part.tensors])

    def made(of: Callable[[Grouped], Tensor], laid: Callable[[Tensor], Tensor], found: list[Grouped]) -> Tensor:
        return laid(join([of(one) for one in found]))

    forms = _blocks(layer) if layer.group is None else _words(layer, layer.group)
    once = _Once(read, list(forms)[-1])
    return {name: once.part(name, partial(made, of, laid), kind) for name, (of, laid, kind) in forms.items()}


def _blocks(layer: PackedLayer) -> _Made:
    """For `draftwood.kernels.nbits`, a group's scale and zero repeated for each of its blocks."""

    def weight(one: Grouped) -> Tensor:
        return packed_blocks(one.whole_OH.unflatten(1, (-1, BLOCK)), one.bits)

    def scale(one: Grouped) -> Tensor:
        return _repeated(one.scale_OG, one, BLOCK).float()

    def zero(one: Grouped) -> Tensor:
        return packed_blocks(_repeated(one.zero_OG, one, BLOCK), one.bits)

    def minimum(one: Grouped) -> Tensor:
        # Counted from the middle: a product without zeros takes a tenth less, and its rounding of rows weighs less.
        counted_OG = ((1 << (one.bits - 1)) - one.zero_OG.float()) * one.scale_OG
        return counted_OG if one.minimum_OG is None else one.minimum_OG + counted_OG

    forms: _Made = {"weight": (weight, torch.clone, torch.uint8), SCALE: (scale, torch.clone, torch.float32)}
    forms |= {ZERO: (zero, torch.clone, torch.uint8)} if layer.zeros else {}
    return forms | ({MINIMUM: (minimum, _turned, torch.float32)} if layer.minimum else {})


def _alike(matrices: list[Grouped]) -> list[Grouped]:
    """Matrices of one layer, all in as many bits as the widest."""
    widest = max(matrix.bits for matrix in matrices)
    return [matrix if matrix.bits == widest else matrix.in_eight_bits() for matrix in matrices]


def _words(layer: PackedLayer, group: int) -> _Made:
    """For `draftwood.kernels.int4`; scales and offsets in the type of the graphs."""

    def whole(one: Grouped) -> Tensor:
        return one.whole_OH

    def scale(one: Grouped) -> Tensor:
        return _repeated(one.scale_OG, one, group)

    def offset(one: Grouped) -> Tensor:
        return 8.0 - _repeated(one.zero_OG, one, group).float()

    forms: _Made = {"weight": (whole, packed_words, torch.int32), SCALE: (scale, _turned, None)}
    return forms | ({OFFSET: (offset, _turned, None)} if layer.zeros else {})


def _turned(value_OG: Tensor) -> Tensor:
    return value_OG.t().contiguous()


def _repeated(value_OG: Tensor, one: Grouped, size: int) -> Tensor:
    """A scale or zero for every ``size`` inputs, [O, H / size]."""
    return value_OG.repeat_interleave(one.whole_OH.shape[1] // size // value_OG.shape[1], 1)
