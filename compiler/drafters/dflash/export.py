"""A DFlash drafter in the layouts of its servers: speculators (vLLM), z-lab's and SpecForge's (SGLang).

Readers of either take embedding and output matrix from the teacher, so neither is written. If the vocabulary is a part
of the teacher's, the rows of the output matrix are written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from draftwood.compiler.drafters.common.checkpoint import CachedCheckpoint, Config, Parts
from draftwood.compiler.drafters.common.export import (
    HEAD,
    SPECULATORS_VERSION,
    block_fields,
    check_agreed,
    dtype_name,
    embedding,
    maps,
    network,
    output_matrix,
    proposals,
    refuse,
)
from draftwood.compiler.drafters.common.vocabulary import Vocabulary
from draftwood.compiler.drafters.dflash.checkpoint import dflash_parts
from draftwood.compiler.drafters.dflash.network import DFlashConfig
from draftwood.compiler.drafters.model import DrafterFolder
from draftwood.compiler.teachers.checkpoint import Checkpoint

Block = TypeVar("Block", bound=DFlashConfig)


def check_block(opened: CachedCheckpoint[Block], layout: str) -> None:
    """RequestError if a layout's readers would take another network for it."""
    config = opened.config
    check_agreed(layout, config)
    absent = {
        "a width other than the teacher's": config.block.hidden != config.target_hidden,
        "attention biases, which its readers place differently": config.block.qkv_bias,
        "the last layer's state, which its readers take with or without the norm": (
            config.aux_layers[-1] == opened.teacher.config.layers
        ),
    }
    refuse(layout, absent)
    differs = "of its own, but its readers take the teacher's"
    refuse(layout, {f"an embedding {differs}": config.own_embedding and not _teachers(opened, "embed.weight"),
                    f"an output matrix {differs}": not config.tied_head and not config.mapped
                    and not _teachers(opened, HEAD)})  # fmt: skip


def _teachers(opened: CachedCheckpoint[Config], name: str) -> bool:
    """Whether a matrix of the drafter is its teacher's, in the drafter's type."""
    matrix = embedding(opened) if name == "embed.weight" else output_matrix(opened)
    theirs = opened.teacher.matrix("embed.weight" if opened.teacher.config.tied else name)
    return torch.equal(matrix, theirs.to(matrix.dtype))


def dflash_speculators(opened: CachedCheckpoint[DFlashConfig], teacher: Checkpoint, verifier: str) -> DrafterFolder:
    """The drafter as speculators writes it, for vLLM."""
    fields = {"architectures": ["DFlashSpeculator"], "speculators_model_type": "dflash"}
    return speculators(opened, teacher, fields, dflash_parts, verifier)


def speculators(
    opened: CachedCheckpoint[Block], teacher: Checkpoint, own: dict[str, Any],
    parts_of: Callable[[Block, Vocabulary], Parts], verifier: str,
) -> DrafterFolder:  # fmt: skip
    """The layout in which speculators writes DFlash and drafters built on it, which add ``own`` fields and parts."""
    config = opened.config
    fields = own | {
        "speculators_version": SPECULATORS_VERSION,
        "draft_vocab_size": config.draft_vocabulary,
        "block_size": config.rows,
        "mask_token_id": config.mask_token,
        "aux_hidden_state_layer_ids": list(config.aux_layers),
        "sample_from_anchor": config.from_root,
        "transformer_layer_config": qwen3_fields(opened),
        "speculators_config": proposals(own["speculators_model_type"], verifier, teacher, config.levels),
        "torch_dtype": dtype_name(opened.dtype),
    }
    tensors = network(opened, parts_of(config, vocabulary_of(config)))
    return DrafterFolder(fields, tensors | ({HEAD: output_matrix(opened), **maps(opened)} if config.mapped else {}))


def specforge(opened: CachedCheckpoint[DFlashConfig], teacher: Checkpoint, verifier: str) -> DrafterFolder:
    """As z-lab and SpecForge write it, for SGLang."""
    config = opened.config
    absent = {
        "a part of the vocabulary": config.mapped,
        "the state that enters layer 0": config.aux_layers[0] == 0,
    }
    refuse("specforge", absent, "export to speculators")
    fields = {
        "architectures": ["DFlashDraftModel"],
        **qwen3_fields(opened),
        "block_size": config.rows,
        "num_target_layers": teacher.config.layers,
        "dflash_config": {
            "mask_token_id": config.mask_token,
            "target_layer_ids": [layer - 1 for layer in config.aux_layers],
        },
    }
    return DrafterFolder(fields, network(opened, dflash_parts(config, vocabulary_of(config))))


def qwen3_fields(opened: CachedCheckpoint[Block]) -> dict[str, Any]:
    """The fields of the block, which sees all of its text."""
    block = opened.config.block
    whole = {"layer_types": ["full_attention"] * block.layers, "sliding_window": None, "use_sliding_window": False}
    return block_fields(block, opened.dtype) | whole


def vocabulary_of(config: DFlashConfig) -> Vocabulary:
    """Rows of the tables as they are written: without padding."""
    return Vocabulary(config.block.vocabulary, config.block.vocabulary, config.draft_vocabulary)


def ends(opened: CachedCheckpoint[Block]) -> dict[str, Tensor]:
    """Embedding and output matrix of a layout with both."""
    return {"embed_tokens.weight": embedding(opened), HEAD: output_matrix(opened)}
