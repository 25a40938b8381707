"""The networks of a bundle as eager modules: without values, or over its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from draftwood.compiler.checkpoints.safetensors_file import map_tensors
from draftwood.compiler.drafters.model import DraftModel, Modules
from draftwood.compiler.ranks.modules import split_layers
from draftwood.compiler.ranks.share import shared_config
from draftwood.compiler.teachers.config import TeacherConfig
from draftwood.compiler.teachers.linear import quantised
from draftwood.compiler.teachers.registry import make_decoder
from draftwood.errors import BundleError


def make_modules(config: TeacherConfig, drafter: DraftModel | None, positions: int, ranks: int = 1) -> Modules:
    """Teacher and drafter without values, rotary tables as long as the cache, on the device of the context.

    With ``ranks`` they are those that each of that many devices runs.
    """
    aux_layers = drafter.aux_layers if drafter else ()
    network = drafter.shared(ranks).module(config, positions) if drafter else None
    if drafter and network:
        quantised(network, drafter.quantised)
    decoder = make_decoder(shared_config(config, ranks), positions, aux_layers)
    for module in (decoder, network):
        if module is not None:
            split_layers(module, ranks)
            module.requires_grad_(False)
    return decoder, network


def load_modules(
    weights: Path | Mapping[str, Tensor], config: TeacherConfig, drafter: DraftModel | None, ranks: int = 1
) -> Modules:
    """The modules over a memory map of one rank's weights in a bundle."""
    tensors = map_tensors(weights) if isinstance(weights, Path) else weights
    with torch.device("meta"):
        modules = make_modules(config, drafter, tensors["rope_cos"].shape[0], ranks)
    for module in modules:
        if module is not None:
            of_module = {name: _of_layer(tensors, name, like.shape) for name, like in module.state_dict().items()}
            module.load_state_dict(of_module, assign=True)
            module.requires_grad_(False)  # assigned parameters bring their own flag
    return modules


def _of_layer(tensors: Mapping[str, Tensor], name: str, shape: Sequence[int]) -> Tensor:
    """A weight; a bias in the type of its layer, which an NPU's file has wider. BundleError if the described network
    has another one."""
    value, weight = tensors.get(name), tensors.get(f"{name.removesuffix('bias')}weight")
    if value is None or value.shape != shape:
        kept = "none" if value is None else list(value.shape)
        raise BundleError(
            f"{name}: the network that the manifest describes has {list(shape)}, the weights {kept}; build it again"
        )
    if not name.endswith(".bias") or weight is None or not weight.is_floating_point():
        return value
    return value.to(weight.dtype)
