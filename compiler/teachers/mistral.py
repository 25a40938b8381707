"""Mistral: a Llama whose rows may see a window of the text only (Jiang et al., 2310.06825)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from draftwood.compiler.checkpoints.fields import Fields
from draftwood.compiler.teachers.llama import Llama
from draftwood.compiler.teachers.reading import without


class Mistral(Llama):
    """``MistralForCausalLM``; a window (v0.1) is honoured by serving texts that fit into it."""

    name = "mistral"
    architecture = "MistralForCausalLM"
    model_types = ("mistral",)
    neutral = without("sliding_window")
    defaults: ClassVar[Mapping[str, object]] = {
        "num_key_value_heads": 8, "sliding_window": 4096, "bos_token_id": 1, "eos_token_id": 2
    }  # fmt: skip

    def biases(self, fields: Fields) -> tuple[bool, bool]:
        return False, False

    def window(self, fields: Fields) -> int | None:
        return None if fields.get("sliding_window") is None else fields.whole("sliding_window")


MISTRAL = Mistral()
