"""Common parts of other engines' layouts, for any kind of drafter: the verifier, the block's fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from draftwood.compiler.drafters.common.checkpoint import CachedCheckpoint, Config, Parts
from draftwood.compiler.teachers.checkpoint import Checkpoint
from draftwood.compiler.teachers.config import RopeScaling, TeacherConfig
from draftwood.compiler.teachers.registry import FAMILIES
from draftwood.errors import RequestError

HEAD = "lm_head.weight"
# The release of speculators whose fields are written.
SPECULATORS_VERSION = "0.7.0"
# Rope whose cosines and sines all readers compute alike.
_AGREED = ("linear", "llama3")


def refuse(layout: str, absent: Mapping[str, bool], way_out: str = "") -> None:
    """RequestError names the first of the things that are there and that the layout has no form of."""
    for what, there in absent.items():
        if there:
            raise RequestError(f"{layout}: no form of {what}{way_out and f'; {way_out}'}")


def check_agreed(layout: str, config: Config) -> None:
    """RequestError if readers of one layout compute different things from it."""
    rope = config.block.rope_scaling
    if rope is not None and rope.kind not in _AGREED:
        raise RequestError(f"{layout}: rope {rope.kind}, which its readers compute in different ways")
    if config.window is not None:
        raise RequestError(f"{layout}: a window of {config.window} tokens, which some of its readers ignore")


def proposals(algorithm: str, verifier: str, teacher: Checkpoint, tokens: int) -> dict[str, Any]:
    """speculators' fields for the verifier and the number of tokens drafted for it."""
    greedy = {
        "proposal_type": "greedy",
        "speculative_tokens": tokens,
        "accept_tolerance": 0.0,
        "verifier_accept_k": 1,
    }
    family = FAMILIES[teacher.config.family]
    return {
        "algorithm": algorithm,
        "default_proposal_method": "greedy",
        "proposal_methods": [greedy],
        "verifier": {"name_or_path": verifier, "architectures": [family.architecture]},
    }


def block_fields(block: TeacherConfig, dtype: torch.dtype) -> dict[str, Any]:
    """The fields of a Llama's configuration, or a Qwen3's if heads have norms."""
    return {
        "model_type": "qwen3" if block.qk_norm else "llama",
        "num_hidden_layers": block.layers,
        "hidden_size": block.hidden,
        "intermediate_size": block.intermediate,
        "num_attention_heads": block.heads,
        "num_key_value_heads": block.kv_heads,
        "head_dim": block.head_dim,
        "vocab_size": block.vocabulary,
        "max_position_embeddings": block.max_positions,
        "rms_norm_eps": block.rms_norm_eps,
        "rope_theta": block.rope_theta,
        "rope_scaling": None if block.rope_scaling is None else _rope(block.rope_scaling),
        "hidden_act": "silu",
        "attention_bias": block.qkv_bias,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": dtype_name(dtype),
    }


def _rope(rope: RopeScaling) -> dict[str, Any]:
    fields: dict[str, Any] = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind == "llama3":
        fields |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
        fields["original_max_position_embeddings"] = rope.original_max_positions
    return fields


def network(opened: CachedCheckpoint[Config], parts: Parts) -> dict[str, Tensor]:
    """The tensors between embedding and output matrix, under the keys of ``parts``."""
    parts = {name: keys for name, keys in parts.items() if name not in ("draft_embed.weight", "draft_head.weight")}
    tensors: dict[str, Tensor] = {}
    for name, keys in parts.items():
        if len(keys) == 1:
            tensors[keys[0][0]] = opened.weight(name)  # without padding rows
        else:
            tensors |= {key: opened.stored(old) for (key, _), old in zip(keys, opened.keys(name), strict=True)}
    return {key: tensor.to(opened.dtype).contiguous() for key, tensor in tensors.items()}


def embedding(opened: CachedCheckpoint[Config]) -> Tensor:
    """The embedding [V, H] of the drafter or, if it has none, of its teacher."""
    stored = opened.config.own_embedding
    matrix_VH = opened.weight("draft_embed.weight") if stored else opened.teacher.matrix("embed.weight")
    return matrix_VH.to(opened.dtype).contiguous()


def output_matrix(opened: CachedCheckpoint[Config]) -> Tensor:
    """The output matrix [draft, H], by ascending teacher's ids; the teacher's if the drafter has none."""
    teacher = opened.teacher
    if opened.config.has_head:
        matrix = opened.weight("draft_head.weight")
    else:
        matrix = teacher.matrix("embed.weight" if teacher.config.tied else "lm_head.weight")
    return matrix[opened.ids.argsort()].to(opened.dtype).contiguous()


def maps(opened: CachedCheckpoint[Config]) -> dict[str, Tensor]:
    """d2t int64 [draft], the offsets to the teacher's ids, ascending; and t2d bool [V]."""
    ids = opened.ids.sort().values
    known = torch.zeros(opened.config.block.vocabulary, dtype=torch.bool)
    return {"d2t": ids - torch.arange(len(ids)), "t2d": known.index_fill(0, ids, True)}


def dtype_name(dtype: torch.dtype) -> str:
    """As config.json has it."""
    return str(dtype).removeprefix("torch.")
