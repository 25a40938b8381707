"""A DSpark drafter in the layout of those who serve it: speculators (vLLM) and DeepSpec (vLLM and SGLang)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from draftwood.compiler.drafters.common.checkpoint import CachedCheckpoint
from draftwood.compiler.drafters.common.export import network, refuse
from draftwood.compiler.drafters.dflash.export import ends, qwen3_fields, speculators, vocabulary_of
from draftwood.compiler.drafters.dspark.checkpoint import DEEPSPEC, dspark_parts
from draftwood.compiler.drafters.dspark.network import DSparkConfig
from draftwood.compiler.drafters.model import DrafterFolder
from draftwood.compiler.teachers.checkpoint import Checkpoint

Opened = CachedCheckpoint[DSparkConfig]
_W2 = "markov_head.markov_w2.weight"
# DeepSpec's class wants the field, and reads it in training alone; this is its own value.
_ANCHORS = 512


def dspark_speculators(opened: Opened, teacher: Checkpoint, verifier: str) -> DrafterFolder:
    """The drafter as speculators writes it, for vLLM."""
    fields = {"architectures": ["DSparkSpeculator"], "speculators_model_type": "dspark", **_heads(opened.config)}
    folder = speculators(opened, teacher, fields, dspark_parts, verifier)
    return folder._replace(tensors=_ascending(opened, folder.tensors))


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
        **qwen3_fields(opened),
        "num_target_layers": teacher.config.layers,
        "block_size": config.rows,
        "mask_token_id": config.mask_token,
        # -1 is what leaves the embedding.
        "target_layer_ids": [layer - 1 for layer in config.aux_layers],
        "num_anchors": _ANCHORS,
        **_heads(config),
    }
    return DrafterFolder(fields, network(opened, dspark_parts(config, vocabulary_of(config))) | ends(opened))


def _heads(config: DSparkConfig) -> dict[str, Any]:
    return {
        "markov_rank": config.markov_rank,
        "markov_head_type": config.markov_head,
        "enable_confidence_head": config.confidence != "none",
        "confidence_head_with_markov": config.confidence == "markov",
    }


def _ascending(opened: Opened, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """With the rows of the bias in ascending order of the teacher's ids, as those of the output matrix are."""
    return tensors | {_W2: tensors[_W2][opened.ids.argsort()].contiguous()}
