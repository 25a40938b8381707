"""A DSpark drafter in the layout of those who serve it: speculators (vLLM) and DeepSpec (vLLM and SGLang)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from draftwood.compiler.drafters.common.checkpoint import CachedCheckpoint
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
from draftwood.compiler.drafters.dspark.checkpoint import DEEPSPEC, dspark_parts
from draftwood.compiler.drafters.dspark.network import DSparkConfig
from draftwood.compiler.drafters.model import DrafterFolder
from draftwood.compiler.teachers.checkpoint import Checkpoint

Opened = CachedCheckpoint[DSparkConfig]
_W2 = "markov_head.markov_w2.weight"
# DeepSpec's class wants the field, and reads it in training alone; this is its own value.
_ANCHORS = 512


def check_block(opened: Opened, layout: str) -> None:
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


def _teachers(opened: Opened, name: str) -> bool:
    """Whether a matrix of the drafter is its teacher's, in the drafter's type."""
    matrix = embedding(opened) if name == "embed.weight" else output_matrix(opened)
    theirs = opened.teacher.matrix("embed.weight" if opened.teacher.config.tied else name)
    return torch.equal(matrix, theirs.to(matrix.dtype))


def speculators(opened: Opened, teacher: Checkpoint, verifier: str) -> DrafterFolder:
    """The drafter as speculators writes it, for vLLM. Its readers take embedding and output matrix from the teacher; of
    a part of the vocabulary the rows of the output matrix are written."""
    config = opened.config
    fields = {
        "architectures": ["DSparkSpeculator"],
        "speculators_model_type": "dspark",
        **_heads(config),
        "speculators_version": SPECULATORS_VERSION,
        "draft_vocab_size": config.draft_vocabulary,
        "block_size": config.rows,
        "mask_token_id": config.mask_token,
        "aux_hidden_state_layer_ids": list(config.aux_layers),
        "sample_from_anchor": config.from_root,
        "transformer_layer_config": _qwen3_fields(opened),
        "speculators_config": proposals("dspark", verifier, teacher, config.levels),
        "torch_dtype": dtype_name(opened.dtype),
    }
    tensors = _network(opened) | ({HEAD: output_matrix(opened), **maps(opened)} if config.mapped else {})
    # The rows of the bias in ascending order of the teacher's ids, as those of the output matrix are.
    return DrafterFolder(fields, tensors | {_W2: tensors[_W2][opened.ids.argsort()].contiguous()})


def deepspec(opened: Opened, teacher: Checkpoint, verifier: str) -> DrafterFolder:
    """As DeepSpec writes it, for vLLM and SGLang."""
    config = opened.config
    absent = {
        "a part of the vocabulary": config.mapped,
        "a first draft by a mask token's row": not config.from_root,
    }
    refuse("deepspec", absent, "export to speculators")
    fields = {
        "architectures": [DEEPSPEC],
        **_qwen3_fields(opened),
        "num_target_layers": teacher.config.layers,
        "block_size": config.rows,
        "mask_token_id": config.mask_token,
        # -1 is what leaves the embedding.
        "target_layer_ids": [layer - 1 for layer in config.aux_layers],
        "num_anchors": _ANCHORS,
        **_heads(config),
    }
    ends = {"embed_tokens.weight": embedding(opened), HEAD: output_matrix(opened)}
    return DrafterFolder(fields, _network(opened) | ends)


def _network(opened: Opened) -> dict[str, Tensor]:
    """The tensors between embedding and output matrix, tables without padding."""
    config = opened.config
    vocabulary = Vocabulary(config.block.vocabulary, config.block.vocabulary, config.draft_vocabulary)
    return network(opened, dspark_parts(config, vocabulary))


def _qwen3_fields(opened: Opened) -> dict[str, Any]:
    """The fields of the block, which sees all of its text."""
    block = opened.config.block
    whole = {"layer_types": ["full_attention"] * block.layers, "sliding_window": None, "use_sliding_window": False}
    return block_fields(block, opened.dtype) | whole


def _heads(config: DSparkConfig) -> dict[str, Any]:
    return {
        "markov_rank": config.markov_rank,
        "markov_head_type": config.markov_head,
        "enable_confidence_head": config.confidence != "none",
        "confidence_head_with_markov": config.confidence == "markov",
    }
