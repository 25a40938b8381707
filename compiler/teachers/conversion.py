"""Conversion of a teacher's linear layers to another precision than its files'.

Plain numbers are rounded to blocks or to W8A8. Packed layers stay packed or become W8A8. W8A8 layers become packed
blocks of eight bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Generic, Literal, TypeVar

import torch
from torch import Tensor

from draftwood.compiler.checkpoints.int8 import rounded
from draftwood.compiler.checkpoints.packed import Grouped
from draftwood.compiler.checkpoints.weight import WeightParts
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
# With -head the output matrix is in W8A8.
Precision = Literal["exact", "nbits", "nbits8", "nbits-head", "w8a8"]
T = TypeVar("T")


def in_precision(checkpoint: Checkpoint, precision: Precision, npu: bool = False) -> Checkpoint:
    """The teacher with its linear layers in ``precision``, in the layout of a CPU's or an NPU's kernels.

    * ``nbits`` on a CPU: packed layers stay packed; a layer of both four and eight bits gets eight. Plain layers are
      rounded to four bits in blocks of 32 inputs. Three get at least eight bits: the output matrix, the plain layers of
      a packed teacher, and all layers of a W8A8 teacher.
    * ``nbits8``: plain layers are rounded to eight bits.
    * ``w8a8``: every linear layer but the output matrix is rounded, from any form. On a CPU the output matrix gets
      eight bits in blocks as with ``nbits``; W8A8 rows would cost more of the perplexity.

    Experts and routers keep the exact product. On a CPU so does a layer with groups that are no multiple of 32 inputs.
    On an NPU a layer is packed under three conditions: four bits throughout, groups of a multiple of 64 inputs, and
    outputs of a multiple of 64.

    Raises:
        RequestError: no layer can be kept so.
    """
    if precision == "exact":
        return checkpoint
    if precision in ("nbits", "nbits8") and checkpoint.config.quantised and not npu:
        return _eight_bits(checkpoint)
    w8a8, packs_head = precision == "w8a8", precision != "nbits-head" and not npu
    checkpoint = _untied(checkpoint) if packs_head else checkpoint
    whole = checkpoint.packed if npu else whole_matrices(checkpoint, 8 if precision == "nbits8" else 4)
    layers = linear_layers(checkpoint.parts)
    quantised = [name for name in rounded_layers(checkpoint) if name != HEAD] if w8a8 else []
    blocked = [name for name in layers if (packs_head if name == HEAD else not w8a8)]
    packed = [form for layer in blocked if (form := _packed_form(checkpoint, layer, whole, npu))]
    if not (packed or quantised) or checkpoint.config.quantised or (npu and precision == "nbits8"):
        raise _refused(checkpoint, precision, npu)
    converted = {form.name: _weights(checkpoint, form, whole) for form in packed}
    converted |= {layer: _requantised(checkpoint, layer) for layer in quantised}
    config = replace(checkpoint.config, packed=tuple(packed), quantised=tuple(quantised))
    teacher = replace(checkpoint, config=config, parts=_with(checkpoint.parts, converted))
    return _with_int8_head(teacher) if precision == "nbits-head" else teacher


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
    """The teacher with a separate output matrix; a tied teacher's is rounded from its embedding."""
    embedding = checkpoint.parts["embed.weight"]
    if not checkpoint.config.tied or embedding.tensors[0][1][1] % BLOCK:
        return checkpoint
    parts = {**checkpoint.parts, f"{HEAD}.weight": embedding}
    return replace(checkpoint, config=replace(checkpoint.config, tied=False), parts=parts)


def _with_int8_head(checkpoint: Checkpoint) -> Checkpoint:
    """The teacher with its output matrix in W8A8, separate from a tied embedding."""
    config, matrix = checkpoint.config, "embed" if checkpoint.config.tied else HEAD
    head = {f"{HEAD}.{kind}": part for kind, part in _requantised(checkpoint, matrix).items()}
    return replace(
        checkpoint,
        config=replace(config, tied=False, quantised=(*config.quantised, HEAD)),
        parts={name: part for name, part in checkpoint.parts.items() if name != f"{HEAD}.weight"} | head,
    )


def _eight_bits(checkpoint: Checkpoint) -> Checkpoint:
    """A W8A8 teacher with the same numbers in blocks."""
    layers, parts = checkpoint.config.quantised, dict(checkpoint.parts)
    for layer in layers:
        parts |= _in_blocks(layer, parts[f"{layer}.weight"], parts[f"{layer}.{SCALE}"])
    packed = tuple(PackedLayer(name=layer, bits=8, zeros=False) for layer in layers)
    return replace(checkpoint, config=replace(checkpoint.config, quantised=(), packed=packed), parts=parts)


def _in_blocks(layer: str, weight: WeightParts, scale: WeightParts) -> dict[str, WeightParts]:
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
        f"{layer}.weight": WeightParts(weight.tensors, whole, torch.uint8),
        f"{layer}.{SCALE}": WeightParts(scale.tensors, scales, torch.float32),
    }


def _with(
    parts: Mapping[str, WeightParts], converted: Mapping[str, Mapping[str, WeightParts]]
) -> dict[str, WeightParts]:
    replaced: dict[str, WeightParts] = {}
    for name, part in parts.items():
        layer, _, kind = name.rpartition(".")
        if kind == "weight" and layer in converted:
            replaced |= {f"{layer}.{tensor}": new for tensor, new in converted[layer].items()}
        else:
            replaced[name] = part
    return replaced


def _requantised(checkpoint: Checkpoint, layer: str) -> dict[str, WeightParts]:
    """int8 [H, O] and scales [O] of the exact product."""

    pair_once = _Once(lambda: rounded(checkpoint.weight(f"{layer}.weight")), SCALE)

    def weight(pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0].t().contiguous()

    def scale(pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[1].flatten()

    return {"weight": pair_once.part("weight", weight, torch.int8), SCALE: pair_once.part(SCALE, scale, torch.float32)}


class _Once(Generic[T]):
    """The shared source of several weights: read for the first, released after the weight ``last`` is written."""

    def __init__(self, read: Callable[[], T], last: str) -> None:
        self._read, self._last, self._held = read, last, list[T]()

    def part(self, name: str, of: Callable[[T], Tensor], kind: torch.dtype | None) -> WeightParts:
        return WeightParts((), partial(self._value, name, of), kind)

    def _value(self, name: str, of: Callable[[T], Tensor], _: Sequence[Tensor]) -> Tensor:
        if not self._held:
            self._held.append(self._read())
        value = of(self._held[0])
        if name == self._last:
            self._held.clear()
        return value


def _packed_form(checkpoint: Checkpoint, layer: str, whole: Mapping[str, WholeMatrix], npu: bool) -> PackedLayer | None:
    names = [name for name, _ in checkpoint.parts[f"{layer}.weight"].tensors]
    matrices = [whole[name] for name in names if name in whole]
    if len(matrices) < len(names):
        return None
    groups, widths = {matrix.shape[1] // matrix.groups for matrix in matrices}, {matrix.bits for matrix in matrices}
    inputs, bits = math.gcd(*groups), max(widths)
    group = next((size for size in GROUPS if inputs % size == 0 and size < matrices[0].shape[1]), None) if npu else None
    fits = widths == {4} and group and sum(matrix.shape[0] for matrix in matrices) % OUTPUTS == 0
    if not (fits if npu else inputs % BLOCK == 0):
        return None
    minimum = any(matrix.minimum for matrix in matrices)
    return PackedLayer(
        name=layer,
        bits=8 if bits == 8 else 4,
        # In eight bits, numbers of four bits count from the middle; a minimum includes any other zero.
        zeros=(npu or not minimum) and not all(matrix.middle for matrix in matrices if matrix.bits == bits),
        minimum=minimum,
        group=group,
    )


_Made = dict[str, tuple[Callable[[Grouped], Tensor], Callable[[Tensor], Tensor], torch.dtype | None]]


def _weights(checkpoint: Checkpoint, layer: PackedLayer, whole: Mapping[str, WholeMatrix]) -> dict[str, WeightParts]:
    """The tensors of the layer's kernel: read from every matrix by outputs, joined, then laid out."""
    part = checkpoint.parts[f"{layer.name}.weight"]
    join: Callable[[Sequence[Tensor]], Tensor] = part.combine or (lambda tensors: torch.cat(tuple(tensors)))

    def read() -> list[Grouped]:
        return _alike([grouped(checkpoint, name, whole[name]) for name, _ in part.tensors])

    def laid_out(of: Callable[[Grouped], Tensor], lay: Callable[[Tensor], Tensor], matrices: list[Grouped]) -> Tensor:
        return lay(join([of(matrix) for matrix in matrices]))

    forms = _blocks(layer) if layer.group is None else _words(layer, layer.group)
    once = _Once(read, list(forms)[-1])
    return {name: once.part(name, partial(laid_out, of, lay), kind) for name, (of, lay, kind) in forms.items()}


def _blocks(layer: PackedLayer) -> _Made:
    """For `draftwood.kernels.nbits`, a group's scale and zero repeated for each of its blocks."""

    def weight(matrix: Grouped) -> Tensor:
        return packed_blocks(matrix.whole_OH.unflatten(1, (-1, BLOCK)), matrix.bits)

    def scale(matrix: Grouped) -> Tensor:
        return _repeated(matrix.scale_OG, matrix, BLOCK).float()

    def zero(matrix: Grouped) -> Tensor:
        return packed_blocks(_repeated(matrix.zero_OG, matrix, BLOCK), matrix.bits)

    def minimum(matrix: Grouped) -> Tensor:
        # Counted from the middle: a product without zeros takes a tenth less, and its rounding of rows weighs less.
        counted_OG = ((1 << (matrix.bits - 1)) - matrix.zero_OG.float()) * matrix.scale_OG
        return counted_OG if matrix.minimum_OG is None else matrix.minimum_OG + counted_OG

    forms: _Made = {"weight": (weight, torch.clone, torch.uint8), SCALE: (scale, torch.clone, torch.float32)}
    forms |= {ZERO: (zero, torch.clone, torch.uint8)} if layer.zeros else {}
    return forms | ({MINIMUM: (minimum, _turned, torch.float32)} if layer.minimum else {})


def _alike(matrices: list[Grouped]) -> list[Grouped]:
    """Matrices of one layer, all in as many bits as the widest."""
    widest = max(matrix.bits for matrix in matrices)
    return [matrix if matrix.bits == widest else matrix.in_eight_bits() for matrix in matrices]


def _words(layer: PackedLayer, group: int) -> _Made:
    """For `draftwood.kernels.int4`; scales and offsets in the type of the graphs."""

    def whole(matrix: Grouped) -> Tensor:
        return matrix.whole_OH

    def scale(matrix: Grouped) -> Tensor:
        return _repeated(matrix.scale_OG, matrix, group)

    def offset(matrix: Grouped) -> Tensor:
        return 8.0 - _repeated(matrix.zero_OG, matrix, group).float()

    forms: _Made = {"weight": (whole, packed_words, torch.int32), SCALE: (scale, _turned, None)}
    return forms | ({OFFSET: (offset, _turned, None)} if layer.zeros else {})


def _turned(value_OG: Tensor) -> Tensor:
    return value_OG.t().contiguous()


def _repeated(value_OG: Tensor, matrix: Grouped, size: int) -> Tensor:
    """A scale or zero for every ``size`` inputs, [O, H / size]."""
    return value_OG.repeat_interleave(matrix.whole_OH.shape[1] // size // value_OG.shape[1], 1)
