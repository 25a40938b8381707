"""An EAGLE-3 drafter in the layout of those who serve it: speculators (vLLM) and SpecForge (SGLang).

The files hold all that their readers could take from somewhere else and take differently: the output matrix is written
out, the vocabulary ascends, every norm flag is stated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from draftwood.compiler.drafters.common.checkpoint import CachedCheckpoint
from draftwood.compiler.drafters.common.vocabulary import Vocabulary
from draftwood.compiler.drafters.eagle3.checkpoint import eagle3_parts
from draftwood.compiler.drafters.eagle3.config import HEAD, Eagle3Config
from draftwood.compiler.drafters.eagle3.layouts import AUX_IDS, Spelling
from draftwood.compiler.teachers.config import RopeScaling, TeacherConfig
from draftwood.compiler.teachers.registry import FAMILIES
from draftwood.errors import RequestError

Opened = CachedCheckpoint[Eagle3Config]
# What a folder is made of: config.json and the tensors by key.
Folder = tuple[dict[str, Any], dict[str, Tensor]]
# The release of speculators whose fields are written.
_SPECULATORS = "0.7.0"
# Rope whose cosines and sines all readers compute alike.
_AGREED = ("linear", "llama3")


def exported(opened: Opened, layout: str, tokens: int, verifier: str) -> Folder:
    """The drafter in a layout; where it says so, to draft so many ``tokens`` a step for the teacher of this name.

    Raises:
        RequestError: the layout is not known, or has no form of what the drafter has.
    """
    if layout not in LAYOUTS:
        raise RequestError(f"{layout}: no layout of EAGLE-3 that is written; expected {' or '.join(LAYOUTS)}")
    config, block = opened.config, opened.config.block
    if block.rope_scaling is not None and block.rope_scaling.kind not in _AGREED:
        raise RequestError(f"{layout}: rope {block.rope_scaling.kind}, which its readers compute in different ways")
    if config.window is not None:
        raise RequestError(f"{layout}: a window of {config.window} tokens, which some of its readers ignore")
    return LAYOUTS[layout](opened, tokens, verifier)


def _speculators(opened: Opened, tokens: int, verifier: str) -> Folder:
    config = opened.config
    fields = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": _SPECULATORS,
        "draft_vocab_size": config.draft_vocabulary,
        "target_hidden_size": config.target_hidden,
        AUX_IDS: list(config.aux_layers),
        "embed_requires_grad": config.own_embedding,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.feature_norm == "whole",
        "fc_norm": config.feature_norm == "each",
        "norm_output": config.norm_output,
        "transformer_layer_config": _block(config.block, opened.dtype),
        "speculators_config": _proposals(verifier, opened.teacher.config.family, tokens),
        "torch_dtype": _name(opened.dtype),
    }
    return fields, _tensors(opened, "layers.0", maps=config.mapped)


def _proposals(name: str, family: str, tokens: int) -> dict[str, Any]:
    """Who verifies, and how many tokens are drafted for it."""
    greedy = {
        "proposal_type": "greedy",
        "speculative_tokens": tokens,
        "accept_tolerance": 0.0,
        "verifier_accept_k": 1,
    }
    return {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [greedy],
        "verifier": {"name_or_path": name, "architectures": [FAMILIES[family].architecture]},
    }


def _specforge(opened: Opened, tokens: int, verifier: str) -> Folder:
    config, block = opened.config, opened.config.block
    absent = {
        "more than one block": block.layers > 1,
        f"{len(config.aux_layers)} states of the teacher; it takes 3": len(config.aux_layers) != 3,
        "the state that enters layer 0": config.aux_layers[0] == 0,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.feature_norm == "whole",
        "norm_output, whose meaning there has changed": config.norm_output,
        "norms of query and key heads": block.qk_norm,
    }
    if found := [what for what, there in absent.items() if there]:
        raise RequestError(f"specforge: no form of {found[0]}; export to speculators")
    left = [layer - 1 for layer in config.aux_layers]
    fields = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **_block(block, opened.dtype),
        "draft_vocab_size": config.draft_vocabulary,
        "target_hidden_size": config.target_hidden,
        "fc_norm": config.feature_norm == "each",
        "eagle_config": {AUX_IDS: left, "use_aux_hidden_state": True},
        # Ours, for SpecForge's ids are published in two meanings: the layers that the states enter.
        "aux_layer_ids": list(config.aux_layers),
    }
    return fields, _tensors(opened, "midlayer", maps=True)


LAYOUTS: Mapping[str, Callable[[Opened, int, str], Folder]] = {"speculators": _speculators, "specforge": _specforge}


def _block(block: TeacherConfig, dtype: torch.dtype) -> dict[str, Any]:
    """The fields of a Llama's configuration, or a Qwen3's where heads have norms."""
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
        "torch_dtype": _name(dtype),
    }


def _rope(rope: RopeScaling) -> dict[str, Any]:
    found: dict[str, Any] = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind == "llama3":
        found |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
        found["original_max_position_embeddings"] = rope.original_max_positions
    return found


def _tensors(opened: Opened, first: str, maps: bool) -> dict[str, Tensor]:
    """Tensors by key, the first block's beginning with ``first``; with the vocabulary's ``maps``."""
    config = opened.config
    known = config.block.vocabulary
    sizes = Vocabulary(known, known, config.draft_vocabulary)
    wanted = eagle3_parts(config, sizes, Spelling("", first, config.block.layers))
    order = opened.ids.argsort()
    found: dict[str, Tensor] = {}
    for name, keys in wanted.items():
        if name == "draft_embed.weight":
            found[keys[0][0]] = opened.weight(name)
        elif name != "draft_head.weight":
            found |= {key: opened.stored(old) for (key, _), old in zip(keys, opened.keys(name), strict=True)}
    found[HEAD] = _output_matrix(opened)[order]
    found = {key: tensor.to(opened.dtype).contiguous() for key, tensor in found.items()}
    if maps:
        ids = opened.ids[order]
        found["d2t"] = ids - torch.arange(len(ids))
        found["t2d"] = torch.zeros(known, dtype=torch.bool).index_fill(0, ids, True)
    return found


def _output_matrix(opened: Opened) -> Tensor:
    """[draft, H], of the drafter or, where it has none, of its teacher."""
    if opened.config.has_head:
        return opened.weight("draft_head.weight")
    teacher = opened.teacher
    return teacher.matrix("embed.weight" if teacher.config.tied else "lm_head.weight")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
