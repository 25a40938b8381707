"""DFlash drafters as people publish them, checked against a teacher.

===========  =================================  =======================================  ==========================
writer       told by                            layer ids of the teacher's states        first draft is made by
===========  =================================  =======================================  ==========================
z-lab        DFlashDraftModel                   left, dflash_config.target_layer_ids     the first mask row
SpecForge    the same                           the same                                 the same; the root's row
                                                                                         if shift_label is true
speculators  speculators_model_type dflash      entered, aux_hidden_state_layer_ids      as sample_from_anchor says
DeepSpec     Qwen3DSparkModel, markov_rank 0    left, target_layer_ids                   the root's row
===========  =================================  =======================================  ==========================

No ids means some that are spread over the teacher (``build_target_layer_ids`` in dflash/model.py of z-lab/dflash).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from draftwood.compiler.checkpoints.fields import Fields
from draftwood.compiler.drafters.common.checkpoint import Parts, block_parts, end_parts
from draftwood.compiler.drafters.common.config import (
    check_aux_layers,
    read_block,
    read_mask_token,
    read_target,
    read_window,
)
from draftwood.compiler.drafters.common.vocabulary import Vocabulary, read_vocabulary
from draftwood.compiler.drafters.dflash.network import DFlashConfig
from draftwood.compiler.teachers.config import TeacherConfig

# DeepSpec's class serves DSpark as well; its variant for another family is known to be refused by its name.
_DEEPSPEC = "Qwen3DSparkModel"
NAMES = ("DFlashDraftModel", "DFlashSpeculator", _DEEPSPEC)
_SUCCESSORS = ("Gemma4DSparkModel",)
_MOST_ROWS = 256
# Fields that make another network of it, each with the values that do not.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "projector_type": ("dflash",),
    "markov_rank": (0,),
    **dict.fromkeys(("causal", "use_swa", "enable_confidence_head", "use_confidence_head"), (False,)),
}


def dflash_parts(config: DFlashConfig, vocabulary: Vocabulary) -> Parts:
    """The weights of the block and both ends of the network."""
    block, hidden = config.block, config.block.hidden
    parts: Parts = {}
    if config.own_embedding:
        parts["draft_embed.weight"] = (("embed_tokens.weight", (vocabulary.stored, hidden)),)
    parts["fc.weight"] = (("fc.weight", (hidden, config.features)),)
    parts["feature_norm.weight"] = (("hidden_norm.weight", (hidden,)),)
    for i in range(block.layers):
        parts |= block_parts(block, f"stack.{i}", f"layers.{i}", hidden)
    return parts | end_parts(config, vocabulary)


def is_dflash(fields: Mapping[str, Any]) -> bool:
    """Whether a config.json is a DFlash drafter's, or one of a successor that is refused by its field."""
    named = fields.get("architectures") in [[name] for name in (*NAMES, *_SUCCESSORS)]
    return named or fields.get("speculators_model_type") == "dflash"


def read_dflash_config(
    fields: Fields, teacher: TeacherConfig, stored: Collection[str]
) -> tuple[DFlashConfig, Vocabulary]:
    """The network that config.json and the keys of the ``stored`` tensors describe, and its vocabulary.

    Raises:
        CheckpointError: a field does not fit the teacher, contradicts another, or makes another network of it.
    """
    nested = fields.nested("dflash_config")
    speculators = fields.get("speculators_model_type") is not None
    inner = fields.nested("transformer_layer_config") if speculators else fields
    _refuse_successors(fields, nested)
    vocabulary = read_vocabulary(fields, inner, teacher)
    numbers = {key.split(".")[1] for key in stored if key.startswith("layers.")}
    block = read_block(inner, teacher, max(len(numbers), 1), ("qwen3",))
    if read_window(inner, block.layers) is not None:
        inner.fail("layer_types", "'full_attention' in every layer: readers disagree about what a sliding block sees")
    config = DFlashConfig(
        block=replace(block, o_bias=block.qkv_bias and "layers.0.self_attn.o_proj.bias" in stored, qk_norm=True),
        target_hidden=read_target(fields, teacher, block.hidden),
        aux_layers=_aux_layers(fields, nested, teacher, block.layers, speculators),
        draft_vocabulary=vocabulary.draft,
        own_embedding="embed_tokens.weight" in stored,
        tied_head="lm_head.weight" not in stored,
        rows=_rows(fields, nested),
        mask_token=read_mask_token((fields, nested), teacher),
        from_root=_from_root(fields, nested),
    )
    if block.hidden != teacher.hidden and (not config.own_embedding or config.tied_head):
        inner.fail("hidden_size", f"{teacher.hidden} as the teacher has, since the drafter lacks matrices of its own")
    return config, vocabulary


def _refuse_successors(fields: Fields, nested: Fields) -> None:
    if fields.get("architectures") in [[name] for name in _SUCCESSORS]:
        fields.fail("architectures", f"one of {', '.join(NAMES)}; Gemma's blocks are not supported")
    for source in (fields, nested):
        for name, plain in _NEUTRAL.items():
            if source.get(name) is not None and source.get(name) not in plain:
                accepted = " or ".join(map(repr, plain))
                source.fail(name, f"{accepted} or no such field: DFlash's successors are not supported")


def _rows(fields: Fields, nested: Fields) -> int:
    stated = {source.whole("block_size") for source in (fields, nested) if source.get("block_size") is not None}
    if len(stated) != 1 or not 2 <= min(stated) <= _MOST_ROWS:
        fields.fail("block_size", f"one number of rows from 2 to {_MOST_ROWS}; found {sorted(stated)}")
    return stated.pop()


def _from_root(fields: Fields, nested: Fields) -> bool:
    deepspec = fields.get("architectures") == [_DEEPSPEC]
    stated = [(fields, "sample_from_anchor"), (nested, "shift_label")]
    flags = {source.flag(name, False) for source, name in stated if source.get(name) is not None}
    if len(flags | ({True} if deepspec else set())) > 1:
        fields.fail("sample_from_anchor", "the same as dflash_config's shift_label, and true in DeepSpec's layout")
    return flags.pop() if flags else deepspec


def _aux_layers(
    fields: Fields, nested: Fields, teacher: TeacherConfig, layers: int, speculators: bool
) -> tuple[int, ...]:
    if fields.get("aux_layer_ids") is not None:
        return check_aux_layers(fields, "aux_layer_ids", fields.tokens("aux_layer_ids", None), teacher)
    if fields.whole("num_target_layers", teacher.layers) != teacher.layers:
        fields.fail("num_target_layers", f"{teacher.layers} as the teacher has; use the drafter of this teacher")
    if speculators and (entered := fields.tokens("aux_hidden_state_layer_ids", None)):
        return check_aux_layers(fields, "aux_hidden_state_layer_ids", entered, teacher)
    stated = {ids for source in (nested, fields) if (ids := source.tokens("target_layer_ids", None))}
    if len(stated) == 2:
        both = f"the same as in dflash_config, {nested.get('target_layer_ids')!r}, or only one of the two"
        fields.fail("target_layer_ids", both)
    left = stated.pop() if stated else _spread(teacher.layers, layers)
    if left[-1] == teacher.layers - 1:
        # A hook captures the last layer's output; transformers' list has it after the norm.
        nested.fail("target_layer_ids", "layers before the last; if the state before the last norm is meant, state it"
                    " as aux_layer_ids, the layers that the states enter")  # fmt: skip
    return check_aux_layers(fields, "target_layer_ids", tuple(layer + 1 for layer in left), teacher)


def _spread(layers: int, count: int) -> tuple[int, ...]:
    """The layers that the states of a drafter of ``count`` layers leave, in a teacher of ``layers``."""
    if count == 1:
        return (layers // 2,)
    return tuple(round(1 + i * (layers - 4) / (count - 1)) for i in range(count))
