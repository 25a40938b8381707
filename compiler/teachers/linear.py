"""A linear layer whose weights are int8, and how a network gets such layers: which ones is data of its teacher."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

import draftwood.kernels  # noqa: F401 (registers the operator)

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


def quantised(network: nn.Module, names: Iterable[str]) -> None:
    """Puts quantised layers, without values, in the places of the network's linear layers of these names."""
    for name in names:
        layer = network.get_submodule(name)
        assert isinstance(layer, nn.Linear), name
        network.set_submodule(name, QuantisedLinear(layer.in_features, layer.out_features, layer.bias is not None))
