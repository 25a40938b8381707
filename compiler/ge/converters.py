"""How operators of ours are put to GE, where torchair's own form of them would cost kernels.

A converter is registered with torchair as its documentation tells makers of operators to, so that the graph compiled
on a device and the one that is lowered here have it alike.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch


def register_converters(torchair: ModuleType, ge: Any) -> None:
    """Registers the converters of all operators of ours; ``ge`` are torchair's GE operators."""

    def rotary_pair(q: Any, k: Any, cos: Any, sin: Any, meta_outputs: Any = None) -> Any:
        return ge.ApplyRotaryPosEmb(q, k, cos, sin, layout=1, rotary_mode="half")

    def linear(x: Any, weight: Any, bias: Any = None, meta_outputs: Any = None) -> Any:
        return ge.MatMulV2(x, weight, bias, None, transpose_x2=True)

    def batched_linear(x: Any, weight: Any, meta_outputs: Any = None) -> Any:
        return ge.BatchMatMul(x, weight, adj_x2=True)

    for converter in (rotary_pair, linear, batched_linear):
        operator = getattr(torch.ops.draftwood, converter.__name__).default
        torchair.register_fx_node_ge_converter(operator)(converter)


__all__ = ["register_converters"]
