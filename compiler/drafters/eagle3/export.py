"""An EAGLE-3 drafter in the layouts of its servers: speculators (vLLM) and SpecForge (SGLang).

The files leave nothing to their readers' defaults: the output matrix is written out, the vocabulary ascends, every norm
flag is stated.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from draftwood.compiler.drafters.common.checkpoint import CachedCheckpoint
from draftwood.compiler.drafters.common.export import (
    HEAD,
    SPECULATORS_VERSION,
    block_fields,
    dtype_name,
    embedding,
    maps,
    network,
    output_matrix,
    proposals,
    refuse,
)
from draftwood.compiler.drafters.common.vocabulary import Vocabulary
from draftwood.compiler.drafters.eagle3.checkpoint import eagle3_parts
from draftwood.compiler.drafters.eagle3.layouts import AUX_IDS, Spelling
from draftwood.compiler.drafters.eagle3.network import Eagle3Config
from draftwood.compiler.drafters.model import DrafterFolder
from draftwood.compiler.teachers.checkpoint import Checkpoint

Opened = CachedCheckpoint[Eagle3Config]
# Default tokens a step.
_USUAL_TOKENS = 5


def speculators(opened: Opened, teacher: Checkpoint, verifier: str) -> DrafterFolder:
    """As speculators writes it, for vLLM."""
    config = opened.config
    fields: dict[str, Any] = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "embed_requires_grad": config.own_embedding,
        "speculators_config": proposals("eagle3", verifier, teacher, _USUAL_TOKENS),
        "speculators_version": SPECULATORS_VERSION,
        "draft_vocab_size": config.draft_vocabulary,
        "target_hidden_size": config.target_hidden,
        AUX_IDS: list(config.aux_layers),
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.feature_norm == "whole",
        "fc_norm": config.feature_norm == "each",
        "norm_output": config.norm_output,
        "transformer_layer_config": block_fields(config.block, opened.dtype),
        "torch_dtype": dtype_name(opened.dtype),
    }
    return DrafterFolder(fields, _tensors(opened, "layers.0", config.mapped))


def specforge(opened: Opened, teacher: Checkpoint, verifier: str) -> DrafterFolder:
    """As SpecForge writes it, for SGLang."""
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
    refuse("specforge", absent, "export to speculators")
    left = [layer - 1 for layer in config.aux_layers]
    fields = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **block_fields(block, opened.dtype),
        "draft_vocab_size": config.draft_vocabulary,
        "target_hidden_size": config.target_hidden,
        "fc_norm": config.feature_norm == "each",
        "eagle_config": {AUX_IDS: left, "use_aux_hidden_state": True},
        # Ours, for SpecForge's ids are published in two meanings: the layers that the states enter.
        "aux_layer_ids": list(config.aux_layers),
    }
    return DrafterFolder(fields, _tensors(opened, "midlayer", True))


def _tensors(opened: Opened, first: str, mapped: bool) -> dict[str, Tensor]:
    """Tensors by key; the first block's keys begin with ``first``; ``mapped`` adds the vocabulary's maps."""
    config, known = opened.config, opened.config.block.vocabulary
    sizes = Vocabulary(known, known, config.draft_vocabulary)
    spelling = Spelling("", first, config.block.layers)
    tensors = network(opened, eagle3_parts(config, sizes, spelling)) | {HEAD: output_matrix(opened)}
    if config.own_embedding:
        tensors[spelling.embedding] = embedding(opened)
    return tensors | (maps(opened) if mapped else {})
