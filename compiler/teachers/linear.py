"""Linear layers whose weights are whole numbers, and how a network gets them: which ones is data of its teacher."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

import draftwood.kernels  # noqa: F401 (registers the operators)
from draftwood.compiler.teachers.config import PackedLayer
from draftwood.kernels.nbits import BLOCK

# H inputs, O outputs


class QuantisedLinear(nn.Module):
    """``nn.Linear`` over ``weight`` int8 [H, O], as an integer product reads it, and ``weight_scale`` float32 [O]."""

    def __init__(self, inputs: int, outputs: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs, dtype=torch.int8), requires_grad=False)
        self.weight_scale = nn.Parameter(torch.empty(outputs, dtype=torch.float32), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(outputs), requires_grad=False) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.draftwood.quantised_linear(x, self.weight, self.weight_scale, self.bias)


class NbitsLinear(nn.Module):
    """``nn.Linear`` over weights in packed blocks, as `draftwood.kernels.nbits` reads them."""

    def __init__(self, inputs: int, outputs: int, bias: bool, bits: int, zeros: bool, minimum: bool) -> None:
        super().__init__()
        blocks = inputs // BLOCK
        shapes = {
            "weight": ((outputs, blocks, BLOCK * bits // 8), torch.uint8),
            "weight_scale": ((outputs, blocks), torch.float32),
            "weight_zero": ((outputs, -(-blocks * bits // 8)), torch.uint8) if zeros else None,
            "weight_minimum": ((blocks, outputs), torch.float32) if minimum else None,
            "bias": ((outputs,), torch.get_default_dtype()) if bias else None,
        }
        _give(self, shapes)

    def forward(self, x: Tensor) -> Tensor:
        values = self.weight, self.weight_scale, self.weight_zero, self.bias, self.weight_minimum
        return torch.ops.draftwood.nbits_linear(x, *values)


class Int4Linear(nn.Module):
    """``nn.Linear`` over weights of four bits in groups of inputs, as `draftwood.kernels.int4` reads them."""

    def __init__(self, inputs: int, outputs: int, bias: bool, group: int, zeros: bool) -> None:
        super().__init__()
        self.group, half = group, torch.get_default_dtype()
        shapes = {
            "weight": ((inputs, outputs // 8), torch.int32),
            "weight_scale": ((inputs // group, outputs), half),
            "weight_offset": ((inputs // group, outputs), half) if zeros else None,
            "bias": ((outputs,), half) if bias else None,
        }
        _give(self, shapes)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight, self.weight_scale, self.weight_offset
        options = {"bias": self.bias, "antiquant_group_size": self.group}
        out: Tensor = torch.ops.npu.npu_weight_quant_batchmatmul(x.flatten(0, -2), *weight, **options)
        return out.unflatten(0, x.shape[:-1])


def _give(layer: nn.Module, shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype] | None]) -> None:
    """Registers parameters without values; None for a parameter that the layer lacks."""
    for name, form in shapes.items():
        value = None if form is None else nn.Parameter(torch.empty(form[0], dtype=form[1]), requires_grad=False)
        layer.register_parameter(name, value)


def quantised(network: nn.Module, names: Iterable[str]) -> None:
    """Puts quantised layers, without values, in the places of the network's linear layers of these names."""
    for name in names:
        layer = network.get_submodule(name)
        assert isinstance(layer, nn.Linear), name
        network.set_submodule(name, QuantisedLinear(layer.in_features, layer.out_features, layer.bias is not None))


def packed(network: nn.Module, layers: Iterable[PackedLayer]) -> None:
    """Replaces layers by packed ones, in place: in blocks for a CPU, in groups for an NPU."""
    for form in layers:
        layer = network.get_submodule(form.name)
        assert isinstance(layer, nn.Linear), form.name
        sizes = layer.in_features, layer.out_features, layer.bias is not None
        if form.group is None:
            packed_layer: nn.Module = NbitsLinear(*sizes, form.bits, form.zeros, form.minimum)
        else:
            packed_layer = Int4Linear(*sizes, form.group, form.zeros)
        network.set_submodule(form.name, packed_layer)
