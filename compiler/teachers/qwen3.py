"""Qwen3, dense: queries and keys are normalised head by head before rotary (2505.09388)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from draftwood.compiler.checkpoints.fields import Fields
from draftwood.compiler.checkpoints.weight import Parts
from draftwood.compiler.teachers.block import Layer, Norm
from draftwood.compiler.teachers.config import TeacherConfig
from draftwood.compiler.teachers.decoder import Decoder
from draftwood.compiler.teachers.llama import Llama
from draftwood.compiler.teachers.qwen2 import Qwen2


class Qwen3Layer(Layer):
    """With a norm for the heads of the queries and one for those of the keys."""

    def __init__(self, config: TeacherConfig) -> None:
        super().__init__(config)
        self.q_norm = Norm(config.head_dim, config.rms_norm_eps)
        self.k_norm = Norm(config.head_dim, config.rms_norm_eps)

    def project(self, x_TH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().project(x_TH)
        q_TND, k_TKD = (rows.unflatten(-1, (-1, self.config.head_dim)) for rows in (q, k))
        return self.q_norm(q_TND).flatten(-2), self.k_norm(k_TKD).flatten(-2), v


class Qwen3Decoder(Decoder):
    """Of such layers."""

    def make_layer(self, index: int) -> Layer:
        return Qwen3Layer(self.config)


class Qwen3(Qwen2):
    """``Qwen3ForCausalLM``."""

    name = "qwen3"
    architecture = "Qwen3ForCausalLM"
    model_types = ("qwen3",)
    decoder = Qwen3Decoder
    defaults: ClassVar[Mapping[str, object]] = {**Qwen2.defaults, "head_dim": 128}

    def biases(self, fields: Fields) -> tuple[bool, bool]:
        return Llama.biases(self, fields)

    def layer_parts(self, config: TeacherConfig, ours: str, theirs: str) -> dict[str, Parts]:
        norms = {side: f"{theirs}.self_attn.{side}_norm.weight" for side in ("q", "k")}
        made = {f"{ours}.{side}_norm.weight": Parts(((name, (config.head_dim,)),)) for side, name in norms.items()}
        return super().layer_parts(config, ours, theirs) | made


QWEN3 = Qwen3()
