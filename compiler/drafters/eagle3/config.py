"""What network the config.json of an EAGLE-3 drafter describes, in any of three published layouts.

They differ in the spelling of a few things; ``architectures`` tells them apart:

==============  =====================================  ==================================  ===========
layout          architectures                          layer ids of the teacher's states   block's keys
==============  =====================================  ==================================  ===========
SafeAILab       LlamaForCausalLM                       states entering, in eagle_config    midlayer.
SpecForge       LlamaForCausalLMEagle3                 published both ways                 midlayer.
speculators     Eagle3Speculator, Eagle3DraftModel     states entering, at the top         layers.0.
==============  =====================================  ==================================  ===========

No ids means states entering layers 2, L // 2 and L - 3 everywhere. SpecForge names the same states 1, L // 2 - 1
and L - 4, the layers they *leave*, and servers tell the two spellings apart by guessing; here only those two
lists are read, and other SpecForge ids are refused. An own field settles every case: ``aux_layer_ids``, the
layers whose entering states are meant.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from draftwood.compiler.checkpoints.fields import Fields
from draftwood.compiler.drafters.common.config import CachedConfig, check_aux_layers, read_block, read_widths
from draftwood.compiler.teachers.config import TeacherConfig
from draftwood.errors import CheckpointError

# Where the teacher states are normalised before fc: not at all, as one vector, or each state on its own.
FeatureNorm = Literal["none", "whole", "each"]
Layout = Literal["SafeAILab", "SpecForge", "speculators"]
# Keys of the two matrices that a drafter may share with its teacher.
EMBED, HEAD = "embed_tokens.weight", "lm_head.weight"

LAYOUTS: dict[str, Layout] = {
    "LlamaForCausalLM": "SafeAILab",
    "LlamaForCausalLMEagle3": "SpecForge",
    "Eagle3Speculator": "speculators",
    "Eagle3DraftModel": "speculators",
}
AUX_IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True, kw_only=True, slots=True)
class Eagle3Config(CachedConfig):
    """An EAGLE-3 drafter with the norms that its successors move; all off is the published network."""

    feature_norm: FeatureNorm = "none"
    # The block's residual is the normalised hidden state instead of the hidden state.
    norm_before_residual: bool = False
    # What is fed back is the hidden state behind the last norm (EAGLE-3.1) instead of the one before it.
    norm_output: bool = False


def read_layout(fields: Fields) -> Layout:
    """Which layout config.json is written in; CheckpointError if in none."""
    named = fields.get("architectures")
    if not isinstance(named, list) or len(named) != 1 or str(named[0]) not in LAYOUTS:
        fields.fail("architectures", f"one of {', '.join(LAYOUTS)}, the published layouts of EAGLE-3")
    layout = LAYOUTS[named[0]]
    kind = fields.get("speculators_model_type")
    if kind != ("eagle3" if layout == "speculators" else None):
        fields.fail(
            "speculators_model_type", f"{'eagle3' if layout == 'speculators' else 'no such field'} beside {named[0]}"
        )
    return layout


def read_eagle3_config(fields: Fields, layout: Layout, teacher: TeacherConfig, stored: Collection[str]) -> Eagle3Config:
    """The network that config.json and the keys of the ``stored`` tensors describe.

    Raises:
        CheckpointError: a field does not fit the teacher, contradicts another, or leaves open what is meant.
    """
    nested = _object(fields, "eagle_config")
    inner = _object(fields, "transformer_layer_config") if layout == "speculators" else fields
    block = read_block(inner, teacher, layers=1)
    target, draft = read_widths(fields, teacher, block)
    config = Eagle3Config(
        block=block,
        target_hidden=target,
        aux_layers=_aux_layers(fields, nested, layout, teacher),
        draft_vocabulary=draft,
        own_embedding=EMBED in stored,
        tied_head=HEAD not in stored,
        feature_norm=_feature_norm(fields, nested),
        norm_before_residual=_norm_before_residual(fields, nested, layout),
        norm_output=_norm_output(fields, nested, layout),
    )
    for what, absent in (("an embedding", not config.own_embedding), ("an output matrix", config.tied_head)):
        if absent and block.hidden != teacher.hidden:
            fields.fail(
                "hidden_size", f"{teacher.hidden} as the teacher has, for the drafter has not {what} of its own"
            )
    return config


def _object(fields: Fields, name: str) -> Fields:
    values = fields.get(name, {})
    if not isinstance(values, dict):
        fields.fail(name, "an object")
    return Fields(fields.path, values)


def _agreed(fields: Fields, nested: Fields, name: str, default: bool | None) -> bool | None:
    """A flag that stands at the top, in eagle_config, or alike in both."""
    found = {source.flag(name, False) for source in (fields, nested) if source.get(name) is not None}
    if len(found) == 2:
        fields.fail(name, f"the same as in eagle_config, {nested.get(name)!r}, or only one of the two")
    return found.pop() if found else default


def _feature_norm(fields: Fields, nested: Fields) -> FeatureNorm:
    whole, each = (bool(_agreed(fields, nested, name, False)) for name in ("norm_before_fc", "fc_norm"))
    if whole and each:
        fields.fail(
            "fc_norm", "false beside norm_before_fc true: the states are normalised as one vector or each alone"
        )
    return "whole" if whole else "each" if each else "none"


def _norm_before_residual(fields: Fields, nested: Fields, layout: Layout) -> bool:
    # Its readers fill in opposite defaults: the library false, vLLM true.
    known = _agreed(fields, nested, "norm_before_residual", None if layout == "speculators" else False)
    if known is None:
        fields.fail("norm_before_residual", "true or false; readers of this layout disagree about the default")
    return known


def _norm_output(fields: Fields, nested: Fields, layout: Layout) -> bool:
    # Until its pull request 879 SpecForge meant "normalise in front of the output matrix" by it.
    stated = _agreed(fields, nested, "norm_output", None)
    if stated is not None and layout != "speculators":
        raise CheckpointError(
            f"{fields.path}: norm_output is {stated}; expected no such field in the {layout} layout, where its"
            " meaning has changed; remove it if the drafter is plain EAGLE-3 (normed logits, un-normed feedback)"
        )
    return bool(stated)


def _aux_layers(fields: Fields, nested: Fields, layout: Layout, teacher: TeacherConfig) -> tuple[int, ...]:
    """The layers that the drafter's three states enter."""
    if not nested.flag("use_aux_hidden_state", True):
        raise CheckpointError(
            f"{fields.path}: use_aux_hidden_state is false; expected true: a drafter on the last state alone is not"
            " EAGLE-3"
        )
    layers = teacher.layers
    entering = (2, layers // 2, layers - 3)
    leaving = tuple(layer - 1 for layer in entering)
    lists = [source.tokens(name, None) for source, name in ((fields, AUX_IDS), (nested, AUX_IDS))]
    found = {ids for ids in lists if ids}
    if fields.get("aux_layer_ids") is not None:
        return check_aux_layers(fields, "aux_layer_ids", fields.tokens("aux_layer_ids", None), teacher)
    if len(found) == 2:
        fields.fail(AUX_IDS, f"the same as in eagle_config, {nested.get(AUX_IDS)!r}, or only one of the two")
    if not found:
        return check_aux_layers(fields, f"{AUX_IDS} left out", entering, teacher)
    ids = found.pop()
    if layout == "SpecForge" and ids in (entering, leaving):
        return check_aux_layers(fields, AUX_IDS, entering, teacher)
    if layout == "SpecForge" or ids == leaving:
        raise CheckpointError(
            f"{fields.path}: {AUX_IDS} is {list(ids)}, which may mean states entering or leaving these layers; expected"
            f" {list(entering)} here; state the layers that the states enter as aux_layer_ids"
        )
    return check_aux_layers(fields, AUX_IDS, ids, teacher)
