"""The networks of a bundle as eager modules: without values, or over its weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from draftwood.compiler.checkpoints.safetensors_file import map_tensors
from draftwood.compiler.drafters.model import DraftModel, Modules
from draftwood.compiler.teachers.config import TeacherConfig
from draftwood.compiler.teachers.registry import make_decoder


def make_modules(config: TeacherConfig, drafter: DraftModel | None, positions: int) -> Modules:
    """Teacher and drafter without values, rotary tables as long as the cache, on the device of the context."""
    decoder = make_decoder(config, positions, drafter.aux_layers if drafter else ()).requires_grad_(False)
    return decoder, drafter.module(config, positions).requires_grad_(False) if drafter else None


def load_modules(weights: Path | Mapping[str, Tensor], config: TeacherConfig, drafter: DraftModel | None) -> Modules:
    """The same over a memory map of a bundle's weights."""
    tensors = map_tensors(weights) if isinstance(weights, Path) else weights
    with torch.device("meta"):
        modules = make_modules(config, drafter, tensors["rope_cos"].shape[0])
    for module in modules:
        if module is not None:
            module.load_state_dict({name: tensors[name] for name in module.state_dict()}, assign=True)
            module.requires_grad_(False)  # assigned parameters bring their own flag
    return modules
