"""openPangu Embedded: a Llama with a bias on every projection of the attention, under a switch of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from draftwood.compiler.checkpoints.fields import Fields
from draftwood.compiler.teachers.llama import Llama


class Pangu(Llama):
    """``PanguEmbeddedForCausalLM``, whose class comes with the checkpoint: any ``model_type`` will do."""

    name = "pangu-embedded"
    architecture = "PanguEmbeddedForCausalLM"
    model_types = ()
    defaults: ClassVar[Mapping[str, object]] = {"rope_theta": 1.6e7, "bos_token_id": 1, "eos_token_id": 45892}

    def biases(self, fields: Fields) -> tuple[bool, bool]:
        bias = fields.flag("bias", fields.flag("attention_bias", True))
        if fields.flag("attention_bias", bias) != bias:
            fields.fail("attention_bias", f"the same as bias, {bias}")
        return bias, bias


PANGU = Pangu()
