"""Mixtral: a Mistral whose every MLP is a mixture of experts (Jiang et al., 2401.04088)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from draftwood.compiler.checkpoints.fields import Fields
from draftwood.compiler.checkpoints.weight import Parts
from draftwood.compiler.teachers.config import TeacherConfig
from draftwood.compiler.teachers.experts import MixtureConfig, MixtureDecoder, mixture_parts
from draftwood.compiler.teachers.mistral import Mistral
from draftwood.compiler.teachers.reading import without


class Mixtral(Mistral):
    """``MixtralForCausalLM``; the shares of the chosen experts always add up to 1."""

    name = "mixtral"
    architecture = "MixtralForCausalLM"
    model_types = ("mixtral",)
    neutral = without("sliding_window", "num_local_experts")
    config = MixtureConfig
    decoder = MixtureDecoder
    default_theta = 1e6
    defaults: ClassVar[Mapping[str, object]] = {
        "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "rms_norm_eps": 1e-5,
        "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip

    def values(self, fields: Fields) -> dict[str, Any]:
        found = super().values(fields)
        fields = Fields(fields.path, {**self.defaults, **fields.values})
        return found | {
            "experts": fields.whole("num_local_experts"),
            "experts_per_token": fields.whole("num_experts_per_tok"),
            "expert_intermediate": found["intermediate"],
            "shares_normalised": True,
            "dense_layers": (),
        }

    def layer_parts(self, config: TeacherConfig, ours: str, theirs: str) -> dict[str, Parts]:
        assert isinstance(config, MixtureConfig)
        plain = (f"{ours}.gate_up.weight", f"{ours}.down.weight")
        found = {n: parts for n, parts in super().layer_parts(config, ours, theirs).items() if n not in plain}
        return found | mixture_parts(config, ours, f"{theirs}.block_sparse_moe", ("w1", "w3", "w2"))


MIXTRAL = Mixtral()
