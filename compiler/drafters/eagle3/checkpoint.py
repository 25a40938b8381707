"""EAGLE-3 drafters as people publish them, checked against a teacher; ``layouts`` lists the writers and their forms."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from draftwood.compiler.checkpoints.fields import Fields
from draftwood.compiler.drafters.common.checkpoint import Parts, block_parts, end_parts
from draftwood.compiler.drafters.common.config import read_block, read_target, read_window
from draftwood.compiler.drafters.common.vocabulary import Vocabulary, read_vocabulary
from draftwood.compiler.drafters.eagle3.layouts import (
    DEEPSPEC,
    SPECULATORS,
    Spelling,
    Writer,
    read_aux_layers,
)
from draftwood.compiler.drafters.eagle3.network import Eagle3Config, FeatureNorm
from draftwood.compiler.teachers.config import TeacherConfig
from draftwood.errors import CheckpointError

# Frequencies of older exporters, and the teacher's tensors that speculators trains with.
UNUSED = (".inv_freq", "verifier_norm.weight", "verifier_lm_head.weight")
HEAD = "lm_head.weight"
# Writers whose config.json has the fields norm_output and fc_norm in EAGLE-3.1's sense.
_NEWER = ("speculators", "Automodel")
# ModelOpt's variants of the network, each by the value that is EAGLE-3.
_MODELOPT = {
    "use_last_layernorm": True,
    "use_input_layernorm_in_first_layer": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
}


def eagle3_parts(config: Eagle3Config, vocabulary: Vocabulary, spelling: Spelling) -> Parts:
    """The weights of the network, and the keys and shapes of what makes them."""
    block, width, before, first = config.block, config.target_hidden, spelling.before, spelling.first
    parts: Parts = {}
    if config.own_embedding:
        parts["draft_embed.weight"] = ((spelling.embedding, (vocabulary.stored, block.hidden)),)
    parts["fc.weight"] = ((f"{before}fc.weight", (block.hidden, config.features)),)
    if config.feature_norm == "whole":
        parts["feature_norm.weight"] = ((f"{before}input_norm.weight", (config.features,)),)
    elif config.feature_norm == "each":
        for i in range(len(config.aux_layers)):
            parts[f"feature_norms.{i}.weight"] = ((f"{before}fc_norm.{i}.weight", (width,)),)
    parts["block.hidden_norm.weight"] = ((f"{first}.hidden_norm.weight", (block.hidden,)),)
    for i in range(block.layers):
        ours, theirs = f"further.{i - 1}" if i else "block", spelling.at(i)
        parts |= block_parts(block, ours, theirs, block.hidden if i else 2 * block.hidden)
    return parts | end_parts(config, vocabulary, before)


def read_eagle3_config(
    fields: Fields, writer: Writer, teacher: TeacherConfig, stored: Collection[str]
) -> tuple[Eagle3Config, Vocabulary]:
    """The network that config.json and the keys of the ``stored`` tensors describe, and its vocabulary.

    Raises:
        CheckpointError: a field does not fit the teacher, contradicts another, or leaves open what is meant.
    """
    nested = fields.nested("eagle_config")
    inner = fields.nested("transformer_layer_config") if writer is SPECULATORS else fields
    spelling = Spelling.of(stored)
    if not spelling.before and "model.embed_tokens.weight" in stored:
        raise CheckpointError(
            f"{fields.path}: a language model without fc.weight, which takes the teacher's states; expected a drafter"
            " that was trained for this teacher; another language model cannot draft here"
        )
    _refuse_variants(fields, nested)
    vocabulary = read_vocabulary(fields, inner, teacher)
    block = _block(inner, writer, teacher, stored, spelling)
    config = Eagle3Config(
        block=block,
        target_hidden=read_target(fields, teacher, block.hidden),
        aux_layers=read_aux_layers(fields, nested, writer, teacher),
        draft_vocabulary=vocabulary.draft,
        own_embedding=spelling.embedding in stored,
        tied_head=HEAD not in stored,
        window=read_window(inner, block.layers),
        feature_norm=_feature_norm(fields, nested),
        norm_before_residual=_norm_before_residual(fields, nested, writer),
        norm_output=_norm_output(fields, nested, writer),
    )
    _check_shared(fields, inner, config, teacher)
    return config, vocabulary


def _refuse_variants(fields: Fields, nested: Fields) -> None:
    for source in (fields, nested):
        for name, plain in _MODELOPT.items():
            if source.flag(name, plain) != plain:
                source.fail(name, f"{str(plain).lower()}: the other network is no EAGLE-3, and no server computes it")
        if source.whole("parallel_draft_step", 1) != 1:
            source.fail("parallel_draft_step", "1; parallel heads with an EAGLE-3 drafter are not supported")


def _block(
    inner: Fields, writer: Writer, teacher: TeacherConfig, stored: Collection[str], spelling: Spelling
) -> TeacherConfig:
    qwen3 = inner.get("model_type") == "qwen3" or writer is DEEPSPEC
    usual = Fields(inner.path, ({"head_dim": 128} if qwen3 else {}) | inner.values)  # Qwen3's class fills this in
    block = read_block(usual, teacher, spelling.layers, ("llama", "qwen3"))
    if writer is DEEPSPEC and spelling.layers > 1:
        # There each further block takes the embedding again; no such drafter is published.
        inner.fail("num_hidden_layers", "1; a deeper drafter of DeepSpec is another network")
    # Some attention classes ignore the switch and have no bias after the heads.
    o_bias = block.qkv_bias and f"{spelling.first}.self_attn.o_proj.bias" in stored
    return replace(block, o_bias=o_bias, qk_norm=_qk_norm(inner, writer, stored, spelling))


def _qk_norm(inner: Fields, writer: Writer, stored: Collection[str], spelling: Spelling) -> bool:
    """If the writer has two classes, the class decides. Elsewhere the tensors do, since ``model_type`` is the teacher's
    as often as the drafter's."""
    kind = inner.get("model_type")
    required = writer is DEEPSPEC or (writer is SPECULATORS and kind == "qwen3")
    return required or (kind != "llama" and f"{spelling.first}.self_attn.q_norm.weight" in stored)


def _check_shared(fields: Fields, inner: Fields, config: Eagle3Config, teacher: TeacherConfig) -> None:
    """Raises if the teacher's matrices would not fit, or if config.json ties matrices that are not tied."""
    for what, absent in (("an embedding", not config.own_embedding), ("an output matrix", config.tied_head)):
        if absent and config.block.hidden != teacher.hidden:
            inner.fail("hidden_size", f"{teacher.hidden} as the teacher has, since the drafter lacks {what} of its own")
    # A tied output matrix would be the drafter's own embedding; one cut to the draft vocabulary cannot be.
    could_be = config.own_embedding and (config.tied_head or not config.mapped)
    if could_be and inner.flag("tie_word_embeddings", False):
        inner.fail("tie_word_embeddings", "false, or no embedding in the file: whose output matrix is meant?")


def _agreed(fields: Fields, nested: Fields, name: str, default: bool | None) -> bool | None:
    """A flag that stands at the top, in eagle_config, or alike in both."""
    flags = {source.flag(name, False) for source in (fields, nested) if source.get(name) is not None}
    if len(flags) == 2:
        fields.fail(name, f"the same as in eagle_config, {nested.get(name)!r}, or only one of the two")
    return flags.pop() if flags else default


def _feature_norm(fields: Fields, nested: Fields) -> FeatureNorm:
    whole, each = (bool(_agreed(fields, nested, name, False)) for name in ("norm_before_fc", "fc_norm"))
    if whole and each:
        fields.fail("fc_norm", "false with norm_before_fc true: the states are normalised as one vector or each alone")
    return "whole" if whole else "each" if each else "none"


def _norm_before_residual(fields: Fields, nested: Fields, writer: Writer) -> bool:
    # The library's default is false in every version; vLLM's is true unless the drafter is P-EAGLE's. Without a named
    # version the trainer is unknown.
    settled = fields.get("speculators_version") is not None or fields.get("speculators_model_type") == "peagle"
    known = _agreed(fields, nested, "norm_before_residual", False if writer is not SPECULATORS or settled else None)
    if known is None:
        fields.fail("norm_before_residual", "true or false; readers of this layout disagree about the default")
    return known


def _norm_output(fields: Fields, nested: Fields, writer: Writer) -> bool:
    if (normed := fields.get("normed_feedback")) is not None:
        return fields.flag("normed_feedback", normed)
    # Until its pull request 879 SpecForge meant "normalise before the output matrix" by it.
    stated = _agreed(fields, nested, "norm_output", None)
    if stated is not None and writer.name not in _NEWER:
        raise CheckpointError(
            f"{fields.path}: norm_output is {stated}; expected no such field in the {writer.name} layout, where its"
            " meaning has changed; state normed_feedback, true for EAGLE-3.1 and false for plain EAGLE-3 (normed"
            " logits, un-normed feedback)"
        )
    return bool(stated)
