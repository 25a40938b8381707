"""DSpark drafters as people publish them, checked against a teacher.

===========  ==========================================  ====================================  ====================
writer       told by                                     the heads' fields stand               keys of the heads
===========  ==========================================  ====================================  ====================
DeepSpec     Qwen3DSparkModel, markov_rank above 0       at the top                            markov_head.markov_w1
speculators  speculators_model_type dspark               at the top                            the same
SpecForge    DSparkDraftModel                            at the top or in dflash_config        the same
ModelOpt     dflash_config.projector_type dspark         in dflash_config                      markov_w1
===========  ==========================================  ====================================  ====================

All else is DFlash's. DeepSpec's first draft is made by the root's row. Other writers must state the row, since
speculators and vLLM have different defaults.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields as fields_of
from typing import Any, cast, get_args

from draftwood.compiler.checkpoints.fields import Fields
from draftwood.compiler.drafters.common.checkpoint import Parts
from draftwood.compiler.drafters.common.vocabulary import Vocabulary
from draftwood.compiler.drafters.dflash.checkpoint import dflash_parts, read_dflash_config
from draftwood.compiler.drafters.dspark.network import Confidence, DSparkConfig, Head
from draftwood.compiler.teachers.config import TeacherConfig

DEEPSPEC, SPECFORGE = "Qwen3DSparkModel", "DSparkDraftModel"
# Architectures of their own, and the one of DFlash that such a folder is read as.
NAMES = {DEEPSPEC: DEEPSPEC, "DSparkSpeculator": "DFlashSpeculator", SPECFORGE: "DFlashDraftModel"}
# Fields of the heads, which DFlash knows only as those of a successor.
_HEADS = (
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "use_confidence_head",
    "confidence_head_with_markov",
    "projector_type",
)
# Prefixes of the heads' keys; ModelOpt leaves the first out.
_BEFORE = ("markov_head.", "confidence_head.proj")


def dspark_parts(
    config: DSparkConfig, vocabulary: Vocabulary, markov: str = _BEFORE[0], confidence: str = _BEFORE[1]
) -> Parts:
    """The weights of the network; ``markov`` and ``confidence`` stand before the keys of the two heads."""
    H, R = config.block.hidden, config.markov_rank
    shapes: dict[str, tuple[int, ...]] = {
        "markov_w1.weight": (vocabulary.stored, R),
        "markov_w2.weight": (vocabulary.head, R),
    }
    if config.markov_head == "gated":
        shapes |= {"gate_proj.weight": (R, H + R), "gate_proj.bias": (R,)}
    if config.markov_head == "rnn":
        shapes |= {"joint_proj.weight": (3 * R, H + 2 * R), "joint_proj.bias": (3 * R,)}
    parts = dflash_parts(config, vocabulary)
    parts |= {f"markov_head.{name}": ((f"{markov}{name}", shape),) for name, shape in shapes.items()}
    if config.confidence != "none":
        width = H + (R if config.confidence == "markov" else 0)
        parts["confidence_proj.weight"] = ((f"{confidence}.weight", (1, width)),)
        parts["confidence_proj.bias"] = ((f"{confidence}.bias", (1,)),)
    return parts


def is_dspark(fields: Mapping[str, Any]) -> bool:
    """Whether a config.json is a DSpark drafter's."""
    names, nested = fields.get("architectures"), fields.get("dflash_config")
    if names == [DEEPSPEC]:
        return fields.get("markov_rank") not in (None, 0)
    named = fields.get("speculators_model_type") == "dspark" or names in [[name] for name in NAMES]
    return named or (isinstance(nested, dict) and nested.get("projector_type") == "dspark")


def read_dspark(
    fields: Fields, teacher: TeacherConfig, stored: Collection[str]
) -> tuple[DSparkConfig, Vocabulary, Parts]:
    """As `CachedModel.read`."""
    nested = fields.nested("dflash_config")
    plain, vocabulary = read_dflash_config(_as_dflash(fields, nested), teacher, stored)
    rank, head = _markov(fields, nested)
    if head == "rnn" and not plain.from_root:
        fields.fail("markov_head_type", "vanilla or gated where the root's row makes no draft: readers differ there")
    config = DSparkConfig(
        **{field.name: getattr(plain, field.name) for field in fields_of(plain)},
        markov_rank=rank,
        markov_head=head,
        confidence=_confidence(fields, nested, stored),
    )
    bare = "markov_w1.weight" in stored
    return config, vocabulary, dspark_parts(config, vocabulary, *(("", "confidence_proj") if bare else _BEFORE))


def _as_dflash(fields: Fields, nested: Fields) -> Fields:
    """The fields without those of the heads, as a DFlash drafter of the same writer has them."""
    names = fields.get("architectures")
    deepspec = names == [DEEPSPEC]
    stated = [(fields, "sample_from_anchor"), (nested, "shift_label")]
    if not deepspec and all(source.get(name) is None for source, name in stated):
        fields.fail(
            "sample_from_anchor", "true where the root's row makes the first draft, as DeepSpec trains, or false"
        )
    values = {name: value for name, value in fields.values.items() if name not in _HEADS}
    values["dflash_config"] = {name: value for name, value in nested.values.items() if name not in _HEADS}
    if isinstance(names, list) and len(names) == 1 and names[0] in NAMES:
        values["architectures"] = [NAMES[names[0]]]
    if values.get("speculators_model_type") == "dspark":
        values["speculators_model_type"] = "dflash"
    if values.get("model_type") == "dspark":
        values["model_type"] = "qwen3"
    return Fields(fields.path, values)


def _stating(fields: Fields, nested: Fields, name: str) -> Fields:
    """The object that states a field of the heads; CheckpointError if both do and differ."""
    if fields.get(name) is not None and nested.get(name, fields.get(name)) != fields.get(name):
        fields.fail(name, f"the same as in dflash_config, {nested.get(name)!r}, or only one of the two")
    return fields if nested.get(name) is None else nested


def _markov(fields: Fields, nested: Fields) -> tuple[int, Head]:
    of_rank, of_head = (_stating(fields, nested, name) for name in ("markov_rank", "markov_head_type"))
    rank, head = of_rank.whole("markov_rank"), of_head.get("markov_head_type", "vanilla")
    if rank < 1:
        of_rank.fail("markov_rank", "1 or more; without the sequential head it is a DFlash drafter, and says so")
    if head not in get_args(Head):
        of_head.fail("markov_head_type", f"one of {', '.join(get_args(Head))}")
    return rank, cast(Head, head)


def _confidence(fields: Fields, nested: Fields, stored: Collection[str]) -> Confidence:
    there = any(key.startswith("confidence_") for key in stored)
    for source in (fields, nested):
        for name in ("enable_confidence_head", "use_confidence_head"):
            if source.flag(name, there) != there:
                source.fail(name, f"{str(there).lower()}, as the tensors say")
    if not there:
        return "none"
    name = "confidence_head_with_markov"
    # SpecForge's class leaves the token out unless the field says otherwise, speculators' the other way round.
    markov = _stating(fields, nested, name).flag(name, fields.get("architectures") != [SPECFORGE])
    return "markov" if markov else "hidden"
