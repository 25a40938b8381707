"""Rotary position embedding: its base and scaling as config.json spells them, and the tables that follow."""

from __future__ import annotations

import math

import numpy as np
import torch

from draftwood.compiler.checkpoints.fields import Fields
from draftwood.compiler.teachers.config import RopeScaling, TeacherConfig

_ROPE_FIELDS = {"rope_type", "type", "rope_theta", "factor", "partial_rotary_factor"}
_LLAMA3_FIELDS = {"low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}


def read_rope(fields: Fields, default_theta: float) -> tuple[float, RopeScaling | None]:
    """Base and scaling: ``rope_parameters`` (transformers 5), or ``rope_theta`` and ``rope_scaling``."""
    spelled = [name for name in ("rope_scaling", "rope_parameters") if fields.get(name)]
    if len(spelled) == 2 and fields.get(spelled[0]) != fields.get(spelled[1]):
        fields.fail("rope_scaling", "the same as rope_parameters, or only one of the two")
    where = spelled[0] if spelled else "rope_scaling"
    if not isinstance(fields.get(where, {}), dict):
        fields.fail(where, "an object")
    rope = Fields(fields.path, fields.get(where, {}))
    theta = rope.number("rope_theta", fields.number("rope_theta", default_theta))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "linear", "llama3") or rope.get("partial_rotary_factor", 1) != 1:
        fields.fail(where, "rope_type default, linear or llama3, over the whole head")
    if unknown := sorted(rope.values.keys() - _ROPE_FIELDS - (_LLAMA3_FIELDS if kind == "llama3" else set())):
        fields.fail(where, f"no {unknown[0]!r} beside rope_type {kind!r}")
    if kind == "default":
        return theta, None
    return theta, _llama3_scaling(rope, fields) if kind == "llama3" else _linear_scaling(rope)


def _linear_scaling(rope: Fields) -> RopeScaling:
    return RopeScaling(kind="linear", factor=rope.number("factor"))


def _llama3_scaling(rope: Fields, fields: Fields) -> RopeScaling:
    # transformers lets the field outside the object win, and falls back to the declared context.
    name = "original_max_position_embeddings"
    return RopeScaling(
        kind="llama3",
        factor=rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_max_positions=fields.whole(name, rope.whole(name, fields.whole("max_position_embeddings"))),
    )


def rope_frequencies(config: TeacherConfig) -> np.ndarray:
    """Inverse frequencies, float64 [head_dim / 2], whose values are exactly those of transformers in float32.

    The power is taken by torch in float32, as transformers' ``modeling_rope_utils`` does it: one unit in the
    last place of a frequency is an angle error of 5e-4 at position 8192, so a more exact value would be
    another teacher than the one that was trained and published. The widening to float64 loses nothing.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    inverse = 1.0 / (config.rope_theta**exponents)
    scaling = config.rope_scaling
    if scaling is not None:
        inverse = inverse / scaling.factor if scaling.kind == "linear" else _llama3(inverse, scaling)
    return inverse.numpy().astype(np.float64)


def _llama3(inverse: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Llama 3.1: between stretched and untouched frequencies, in transformers' order of steps."""
    low, high, trained = scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_max_positions
    wavelength = 2 * math.pi / inverse
    share = (trained / wavelength - low) / (high - low)
    mixed = (1 - share) * inverse / scaling.factor + share * inverse
    mixed = torch.where(wavelength > trained / low, inverse / scaling.factor, mixed)
    return torch.where(wavelength < trained / high, inverse, mixed)


def rope_tables(config: TeacherConfig, positions: int) -> tuple[np.ndarray, np.ndarray]:
    """Cosine and sine, each float32 [positions, head_dim], in rotate-half form: the two halves are equal.

    Angles are float32 products, as in transformers, and torch takes the cosines; so the tables equal
    ``LlamaRotaryEmbedding``'s on the same machine.
    """
    # P positions, F frequencies = head_dim / 2.
    inverse_F = torch.from_numpy(rope_frequencies(config)).float()
    angles_PF = torch.arange(positions, dtype=torch.float32)[:, None] * inverse_F
    angles = torch.cat((angles_PF, angles_PF), dim=-1)
    return angles.cos().numpy(), angles.sin().numpy()
