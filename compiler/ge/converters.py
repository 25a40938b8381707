"""How operators of ours are put to GE, where torchair's own form of them would cost kernels.

A converter is registered with torchair as its documentation tells makers of operators to, so that the graph compiled
on a device and the one that is lowered here have it alike.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import torch


def register_converters(torchair: ModuleType) -> None:
    """Registers the converters of all operators of ours."""
    ge = importlib.import_module("torchair._ge_concrete_graph.ge_apis")

    def rotary_pair(q: Any, k: Any, cos: Any, sin: Any, meta_outputs: Any = None) -> Any:
        return ge.ApplyRotaryPosEmb(q, k, cos, sin, layout=1, rotary_mode="half")

    torchair.register_fx_node_ge_converter(torch.ops.draftwood.rotary_pair.default)(rotary_pair)


__all__ = ["register_converters"]
