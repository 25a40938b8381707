"""The weights of a teacher with quantised linear layers: which layers these are, and the tensors that make each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from draftwood.compiler.checkpoints.safetensors_file import DTYPES, Entry
from draftwood.compiler.checkpoints.scheme import Chosen
from draftwood.compiler.checkpoints.weight import Shape, WeightParts
from draftwood.errors import CheckpointError

# H inputs, O outputs

SCALE, OFFSET = "weight_scale", "weight_offset"
_Combine = Callable[[Sequence[Tensor]], Tensor]


def quantised_layers(parts: Mapping[str, WeightParts], chosen: Chosen) -> tuple[str, ...]:
    """Our names of the quantised linear layers.

    Raises:
        CheckpointError: no tensor is quantised, an expert is, or one layer has both quantised and plain tensors.
    """
    quantised = []
    for layer in linear_layers(parts):
        modules = [name.removesuffix(".weight") for name, _ in parts[f"{layer}.weight"].tensors]
        states = {module: chosen(module) for module in modules}
        if len(set(states.values())) > 1:
            plain, whole = (next(module for module in modules if states[module] is state) for state in (False, True))
            raise CheckpointError(
                f"{plain} is not quantised and {whole} is; expected both alike, since they are one product here"
            )
        quantised += [layer] if states[modules[0]] else []
    for name, part in parts.items():
        if not name.endswith((".weight", ".bias")) and any(chosen(n.removesuffix(".weight")) for n, _ in part.tensors):
            raise CheckpointError(f"{part.tensors[0][0]} is quantised; experts are supported in floating point alone")
    if not quantised:
        raise CheckpointError("the description of its quantisation names none of the teacher's linear layers")
    return tuple(quantised)


def linear_layers(parts: Mapping[str, WeightParts]) -> list[str]:
    """Our names of the layers with a matrix, in the order of the forward pass; the embedding is none."""
    return [
        name.removesuffix(".weight")
        for name, part in parts.items()
        if name.endswith(".weight") and name != "embed.weight" and all(len(shape) == 2 for _, shape in part.tensors)
    ]


def quantised_parts(parts: Mapping[str, WeightParts], layers: Sequence[str], offsets: bool) -> dict[str, WeightParts]:
    """The parts, with int8 weights [H, O] and scales [O] for quantised layers; with ``offsets``, zeros as well."""
    with_scales = {}
    for name, part in parts.items():
        layer, _, kind = name.rpartition(".")
        if layer not in layers:
            with_scales[name] = part
            continue
        join = part.combine or _joined
        if kind == "bias":  # fp32 in msModelSlim's files, whatever the teacher's type
            with_scales[name] = replace(part, combine=join)
            continue
        with_scales[name] = WeightParts(part.tensors, partial(_turned, join), torch.int8)
        scales = _beside(part, SCALE)
        more = _beside(part, OFFSET) if offsets else ()
        with_scales[f"{layer}.{SCALE}"] = WeightParts(
            scales + more, partial(_scales, join, layer, len(scales)), torch.float32
        )
    return with_scales


def check_quantised(parts: Mapping[str, WeightParts], stored: Mapping[str, Entry]) -> dict[str, Entry]:
    """The tensors that are not of quantised layers, whose biases may be fp32; CheckpointError if one has the wrong
    type."""
    kinds = {
        name: ("I8",) if part.dtype is torch.int8 else (*DTYPES, "I8" if name.endswith(OFFSET) else "F32")
        for part in parts.values()
        for name, _ in part.tensors
        if part.dtype is not None
    }
    for name, known in kinds.items():
        if stored[name].kind not in known:
            raise CheckpointError(
                f"{stored[name].file}: {name} has dtype {stored[name].kind}; expected {known[0]}, for its layer is"
                " quantised by the checkpoint's description"
            )
    scaled = [part for name, part in parts.items() if f"{name.removesuffix('bias')}{SCALE}" in parts]
    biases = {name for part in scaled for name, _ in part.tensors if stored[name].kind == "F32"}
    return {name: entry for name, entry in stored.items() if name not in kinds.keys() | biases}


def _beside(part: WeightParts, kind: str) -> tuple[tuple[str, Shape], ...]:
    return tuple((f"{name.removesuffix('weight')}{kind}", (shape[0], 1)) for name, shape in part.tensors)


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat(tuple(tensors))


def _turned(join: _Combine, tensors: Sequence[Tensor]) -> Tensor:
    return join(tensors).t().contiguous()


def _scales(join: _Combine, layer: str, count: int, tensors: Sequence[Tensor]) -> Tensor:
    scale_O = join([tensor.float() for tensor in tensors[:count]]).flatten()
    if any(bool(tensor.any()) for tensor in tensors[count:]):
        raise CheckpointError(f"{layer}: {OFFSET} is not all zeros; expected symmetric weights")
    if bool((scale_O < 0).any()):
        raise CheckpointError(f"{layer}: {SCALE} holds {float(scale_O.min())}; expected no negative scale")
    return scale_O
