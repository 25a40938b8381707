"""The families of teachers: the one place where they are listed, and how one is found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from draftwood.compiler.checkpoints.fields import Fields, read_json
from draftwood.compiler.checkpoints.scheme import quantised_modules
from draftwood.compiler.teachers import generation
from draftwood.compiler.teachers.added_tokens import end_id, fields_of
from draftwood.compiler.teachers.config import TeacherConfig
from draftwood.compiler.teachers.decoder import Decoder
from draftwood.compiler.teachers.families import Mistral, Mixtral, Pangu, Qwen2, Qwen3, Qwen3Moe
from draftwood.compiler.teachers.family import Family
from draftwood.compiler.teachers.glm4 import Glm4
from draftwood.compiler.teachers.linear import packed, quantised
from draftwood.compiler.teachers.llama import LLAMA
from draftwood.compiler.teachers.quantised import quantised_layers
from draftwood.errors import BundleError, CheckpointError
from draftwood.manifest import MANIFEST_FILE

# By the name that a TeacherConfig and a manifest give.
_ALL = (LLAMA, Qwen2(), Qwen3(), Qwen3Moe(), Mistral(), Mixtral(), Glm4(), Pangu())
FAMILIES: dict[str, Family] = {family.name: family for family in _ALL}

# Families that people ask for, and the parts of them that have no form here.
_GEMMA = "its norms, embedding and windows by layer have no form here"
_BEYOND = {
    "GptOssForCausalLM": "its attention has sinks and windows by layer, its experts biases and a clamp",
    **dict.fromkeys(("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration", "Gemma2ForCausalLM"), _GEMMA),
}


def family_of(config: TeacherConfig) -> Family:
    """The family of a teacher."""
    return FAMILIES[config.family]


def read_config(folder: Path) -> TeacherConfig:
    """Reads the teacher's dimensions from config.json, and more end tokens from generation_config.json and the
    tokenizer, as vLLM, SGLang and MLX do: of a fine-tuned model the tokenizer alone may name the end of a turn.

    Raises:
        CheckpointError: a file is missing or not JSON, a field is unsupported, or an adapter lies next to them.
    """
    if (path := folder / "adapter_config.json").is_file():  # transformers would add it to the weights
        raise CheckpointError(f"{path}: an adapter; expected whole weights: merge it with PEFT's merge_and_unload")
    if folder.is_file():
        raise CheckpointError(
            f"{folder}: a file whose name does not end in .gguf; expected a Hugging Face folder or a GGUF file; if it"
            " is one, link such a name to it"
        )
    if not (folder / "config.json").exists() and (folder / MANIFEST_FILE).is_file():
        raise CheckpointError(f"{folder}: a bundle; expected a teacher: a Hugging Face folder or a GGUF file")
    described = Fields(folder / "config.json", read_json(folder / "config.json"))
    config = config_of(described)
    fields, of_tokenizer = fields_of(folder / generation.FILE), end_id(folder)
    ends = fields.tokens("eos_token_id", None)
    if not all(0 <= end < config.vocabulary for end in ends):
        fields.fail("eos_token_id", f"ids below {config.vocabulary}, which vocab_size of config.json says")
    # A tokenizer may have tokens that the teacher cannot write.
    ends += (of_tokenizer,) if of_tokenizer is not None and of_tokenizer < config.vocabulary else ()
    # A family's own end token is for folders that name none: id 2 is </s> to Llama 2, and "#" to Llama 3.
    named = config.eos if "eos_token_id" in described.values or not ends else ()
    return replace(config, eos=tuple(dict.fromkeys((*named, *ends))))


def config_of(fields: Fields) -> TeacherConfig:
    """The teacher's dimensions from the fields of a config.json.

    Raises:
        CheckpointError: a field does not fit what is supported.
    """
    family, chosen = _recognised(fields), quantised_modules(fields)
    values = family.values(fields)
    values["eos"] = tuple(dict.fromkeys(values["eos"]))
    try:
        config = family.config(**values)
        return replace(config, quantised=quantised_layers(family.parts(config), chosen)) if chosen else config
    except CheckpointError as error:
        raise CheckpointError(f"{fields.path}: {error}") from None


def described_config(described: Mapping[str, Any]) -> TeacherConfig:
    """The configuration that a manifest holds field by field; BundleError if it is none of a family known here."""
    family = FAMILIES.get(str(described.get("family")))
    if family is None:
        known = ", ".join(FAMILIES)
        raise BundleError(f"teacher of family {described.get('family')!r}; expected one of {known}; build it again")
    try:
        return msgspec.convert(described, family.config)
    except msgspec.ValidationError as error:
        raise BundleError(f"teacher of family {family.name}: its configuration is damaged ({error})") from None


def make_decoder(config: TeacherConfig, positions: int, aux_layers: tuple[int, ...] = ()) -> Decoder:
    """The teacher's network without values, on the device of the context."""
    decoder = family_of(config).decoder(config, positions, aux_layers)
    quantised(decoder, config.quantised)
    packed(decoder, config.packed)
    return decoder


def _recognised(fields: Fields) -> Family:
    known = {family.architecture: family for family in FAMILIES.values()}
    named = fields.get("architectures")
    if not isinstance(named, list) or len(named) != 1 or str(named[0]) not in known:
        beyond = _BEYOND.get(str(named[0]) if isinstance(named, list) and named else "", "no other is supported")
        fields.fail("architectures", f"one of {', '.join(known)}: {beyond}")
    family = known[named[0]]
    if family.model_types and fields.get("model_type", family.model_types[0]) not in family.model_types:
        fields.fail("model_type", f"{' or '.join(map(repr, family.model_types))} with {family.architecture}")
    return family
