"""Qwen3, dense: queries and keys are normalised head by head before rotary (2505.09388)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from draftwood.compiler.checkpoints.fields import Fields
from draftwood.compiler.checkpoints.weight import Parts
from draftwood.compiler.teachers.config import TeacherConfig
from draftwood.compiler.teachers.llama import Llama
from draftwood.compiler.teachers.qwen2 import Qwen2


class Qwen3(Qwen2):
    """``Qwen3ForCausalLM``."""

    name = "qwen3"
    architecture = "Qwen3ForCausalLM"
    model_types = ("qwen3",)
    defaults: ClassVar[Mapping[str, object]] = {**Qwen2.defaults, "head_dim": 128}

    def values(self, fields: Fields) -> dict[str, Any]:
        return super().values(fields) | {"qk_norm": True}

    def biases(self, fields: Fields) -> tuple[bool, bool]:
        return Llama.biases(self, fields)

    def layer_parts(self, config: TeacherConfig, ours: str, theirs: str) -> dict[str, Parts]:
        norms = {side: f"{theirs}.self_attn.{side}_norm.weight" for side in ("q", "k")}
        made = {f"{ours}.{side}_norm.weight": Parts(((name, (config.head_dim,)),)) for side, name in norms.items()}
        return super().layer_parts(config, ours, theirs) | made


QWEN3 = Qwen3()
