"""What the students with caches share: the teacher's states that they read, their block's sizes, their files."""

from __future__ import annotations

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


# How far from either end of the teacher the outer two of the states that are read enter: as EAGLE-3's (SafeAILab/EAGLE)
# where it has layers enough, else nearer to the ends.
_MARGINS = ((2, 3), (1, 2), (0, 0))


def aux_layers(teacher: LlamaForCausalLM) -> tuple[int, ...]:
    """The layers whose entering states are read: 2, L // 2 and L - 3 of a teacher of seven layers or more.

    Raises:
        RequestError: the teacher has too few layers for three different ones.
    """
    layers: int = teacher.config.num_hidden_layers
    for low, high in _MARGINS:
        if low < layers // 2 < layers - high:
            return low, layers // 2, layers - high
    raise RequestError(f"the teacher has {layers} layers; expected 2 or more, for a drafter reads three states of it")


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
