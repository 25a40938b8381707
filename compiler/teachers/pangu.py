"""openPangu Embedded: a Llama with a bias on every projection of the attention, under a switch of its own."""

from __future__ import annotations

from draftwood.compiler.checkpoints.fields import Fields
from draftwood.compiler.teachers.llama import Llama


class Pangu(Llama):
    """``PanguEmbeddedForCausalLM``, whose class comes with the checkpoint: any ``model_type`` will do."""

    name = "pangu-embedded"
    architecture = "PanguEmbeddedForCausalLM"
    model_types = ()
    rope_theta = 1.6e7
    attention_bias = True
    eos = 45892

    def biased(self, fields: Fields) -> bool:
        bias = super().biased(fields)
        if fields.get("bias") is None:
            return bias
        bias = fields.flag("bias", bias)
        if fields.flag("attention_bias", bias) != bias:
            fields.fail("attention_bias", f"the same as bias, {bias}")
        return bias


PANGU = Pangu()
