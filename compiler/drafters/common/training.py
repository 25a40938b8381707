"""What the students with caches share: the teacher's states that they read, their block's sizes, their files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import Tensor

from draftwood.compiler.checkpoints.fields import read_json
from draftwood.compiler.drafters.common.block import Sizes
from draftwood.errors import CheckpointError, RequestError

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

# V draft vocabulary


def aux_layers(options: Mapping[str, Any], teacher: LlamaForCausalLM) -> tuple[int, ...]:
    """The layers whose entering states are read, by default those of EAGLE-3 (SafeAILab/EAGLE): 2, L // 2 and L - 3.

    Raises:
        RequestError: the teacher has too few layers for three different ones.
    """
    if options["aux_layers"]:
        return tuple(options["aux_layers"])
    layers = teacher.config.num_hidden_layers
    aux = (2, layers // 2, layers - 3)
    if not aux[0] < aux[1] < aux[2]:
        raise RequestError(f"the teacher has {layers} layers: too few for the usual three; name some with --aux-layers")
    return aux


def teacher_sizes(teacher: LlamaForCausalLM) -> Sizes:
    """The dimensions of the teacher's own blocks."""
    config: Any = teacher.config
    return Sizes(
        config.hidden_size, config.intermediate_size, config.num_attention_heads, config.num_key_value_heads,
        config.head_dim, config.rms_norm_eps, config.rope_parameters["rope_theta"],
    )  # fmt: skip


def read_trained(folder: Path, architecture: str) -> tuple[dict[str, Any], Sizes, dict[str, Tensor], Tensor | None]:
    """What a training has written: config.json, the block's sizes, the weights, and the draft ids int64 [V] if any.

    Raises:
        CheckpointError: the folder was written by somebody else.
    """
    path = folder / "config.json"
    config = read_json(path)
    if config.get("architectures") != [architecture]:
        raise CheckpointError(
            f"{path}: architectures is {config.get('architectures')}; expected a drafter trained here"
        )
    for name in (field.name for field in fields(Sizes)):
        if name not in config:
            raise CheckpointError(f"{path}: no field {name!r}; expected a drafter trained here")
    with safe_open(folder / "model.safetensors", framework="pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    offsets_V, _ = tensors.pop("d2t", None), tensors.pop("t2d", None)
    ids_V = None if offsets_V is None else offsets_V + torch.arange(len(offsets_V))
    return config, Sizes(**{field.name: config[field.name] for field in fields(Sizes)}), tensors, ids_V
