"""GLM-4-0414 and GLM-Z1: norms after attention and MLP as well, and rotary over a part of a head (2406.12793)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from draftwood.compiler.checkpoints.fields import Fields
from draftwood.compiler.checkpoints.weight import WeightParts
from draftwood.compiler.teachers.block import Layer, Norm
from draftwood.compiler.teachers.config import TeacherConfig
from draftwood.compiler.teachers.decoder import Decoder
from draftwood.compiler.teachers.llama import Llama
from draftwood.compiler.teachers.reading import without
from draftwood.compiler.teachers.rope import rope_tables
from draftwood.errors import CheckpointError

# T rows, H hidden, I intermediate, P positions, D head dimension, R dimensions of it that are rotated

_EOS = (151329, 151336, 151338)
_SHARE = "partial_rotary_factor"


@dataclass(frozen=True, kw_only=True, slots=True)
class Glm4Config(TeacherConfig):
    """With how many dimensions of a head are rotated."""

    # R: even, at most head_dim. The published layout rotates the first R, neighbours in pairs.
    rotary_dim: int

    def __post_init__(self) -> None:
        # slots=True makes a new class, which super() without arguments does not know.
        super(Glm4Config, self).__post_init__()
        if not 2 <= self.rotary_dim <= self.head_dim or self.rotary_dim % 2:
            raise CheckpointError(
                f"{_SHARE} rotates {self.rotary_dim} dimensions; expected an even number from 2 to {self.head_dim}"
            )


class Glm4Layer(Layer):
    """A layer that normalises the results of attention and MLP before it adds them."""

    def __init__(self, config: TeacherConfig) -> None:
        super().__init__(config)
        self.attn_out_norm = Norm(config.hidden, config.rms_norm_eps)
        self.mlp_out_norm = Norm(config.hidden, config.rms_norm_eps)

    def feed_forward(self, attended_TH: Tensor, residual_TH: Tensor) -> tuple[Tensor, Tensor]:
        normed_TH, residual_TH = self.mlp_norm.added(self.attn_out_norm(self.o(attended_TH)), residual_TH)
        return self.mlp_out_norm(self.mlp(normed_TH)), residual_TH


class Glm4Decoder(Decoder):
    """A decoder with GLM-4's layers."""

    def make_layer(self, index: int) -> Layer:
        return Glm4Layer(self.config)


class Glm4(Llama):
    """``Glm4ForCausalLM``."""

    name = "glm4"
    architecture = "Glm4ForCausalLM"
    model_types = ("glm4",)
    neutral = without(_SHARE, "rope_interleave")
    config = Glm4Config
    decoder = Glm4Decoder
    defaults: ClassVar[Mapping[str, object]] = {
        "num_key_value_heads": 2, "head_dim": 128, "attention_bias": True, "rms_norm_eps": 1.5625e-7
    }  # fmt: skip

    def values(self, fields: Fields) -> dict[str, Any]:
        share, whole = _rotated_share(fields)
        values = super().values(whole)
        return values | {"rotary_dim": int(values["head_dim"] * share), "eos": values["eos"] or _EOS}

    def biases(self, fields: Fields) -> tuple[bool, bool]:
        return fields.flag("attention_bias", True), False

    def layer_parts(self, config: TeacherConfig, ours: str, theirs: str) -> dict[str, WeightParts]:
        assert isinstance(config, Glm4Config)
        H, I = config.hidden, config.intermediate  # noqa: E741
        parts = super().layer_parts(config, ours, theirs)
        order = partial(_in_halves, head_dim=config.head_dim, rotary_dim=config.rotary_dim)
        for name in parts.keys() & {f"{ours}.qkv.weight", f"{ours}.qkv.bias"}:
            parts[name] = replace(parts[name], combine=order)
        parts[f"{ours}.gate_up.weight"] = WeightParts(((f"{theirs}.mlp.gate_up_proj.weight", (2 * I, H)),))
        parts[f"{ours}.attn_out_norm.weight"] = WeightParts(((f"{theirs}.post_self_attn_layernorm.weight", (H,)),))
        parts[f"{ours}.mlp_out_norm.weight"] = WeightParts(((f"{theirs}.post_mlp_layernorm.weight", (H,)),))
        return parts

    def tables(self, config: TeacherConfig, positions: int) -> dict[str, np.ndarray]:
        """Each half of a head ends with its part that is not rotated: an angle of zero."""
        assert isinstance(config, Glm4Config)
        R, still = config.rotary_dim, (config.head_dim - config.rotary_dim) // 2
        tables = {}
        for name, table_PR, rest in zip(
            ("rope_cos", "rope_sin"), rope_tables(replace(config, head_dim=R), positions), (1, 0), strict=True
        ):
            half_PE = np.pad(table_PR[:, : R // 2], ((0, 0), (0, still)), constant_values=rest)
            tables[name] = np.concatenate((half_PE, half_PE), 1)
        return tables


def _rotated_share(fields: Fields) -> tuple[float, Fields]:
    """Which part of a head is rotated, and the fields as if it were all of it; rope's own field counts first."""
    share, values = fields.number(_SHARE, 0.5), dict(fields.values)
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(values.get(name), dict):
            share = Fields(fields.path, values[name]).number(_SHARE, share)
            values[name] = {key: value for key, value in values[name].items() if key != _SHARE}
    return share, Fields(fields.path, values)


def _in_halves(tensors: Sequence[Tensor], head_dim: int, rotary_dim: int) -> Tensor:
    """q, k and v below each other. Pairs of neighbours in q and k go to the same place of the two halves of a head.

    Queries and keys are reordered alike, so their products do not change.
    """
    first, second = torch.arange(0, rotary_dim, 2), torch.arange(1, rotary_dim, 2)
    still = torch.arange(rotary_dim, head_dim).chunk(2) if rotary_dim < head_dim else (first[:0], first[:0])
    order = torch.cat((first, still[0], second, still[1]))
    q, k, v = tensors
    return torch.cat((*(side.unflatten(0, (-1, head_dim))[:, order].flatten(0, 1) for side in (q, k)), v))
