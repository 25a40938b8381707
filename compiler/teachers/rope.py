"""Rotary position embedding: the frequencies of a teacher and the tables that follow."""

from __future__ import annotations

import math

import numpy as np
import torch

from draftwood.compiler.teachers.config import RopeScaling, TeacherConfig


def rope_frequencies(config: TeacherConfig) -> np.ndarray:
    """Inverse frequencies, float64 [head_dim / 2], whose values are exactly those of transformers in float32.

    torch takes the power in float32, as transformers' ``modeling_rope_utils`` does. One unit in the last place of a
    frequency is an angle error of 5e-4 at position 8192. A more exact value would be another teacher than the published
    one. The widening to float64 loses nothing.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    scaling = config.rope_scaling
    periods = _base(config) ** exponents
    inverse = 1.0 / periods
    if scaling is None or scaling.kind == "dynamic":
        scaled = inverse
    elif scaling.kind == "linear":
        scaled = inverse / scaling.factor
    elif scaling.kind == "llama3":
        scaled = llama3_frequencies(inverse, scaling)
    else:
        scaled = _yarn(periods, config, scaling)
    return scaled.numpy().astype(np.float64)


def _base(config: TeacherConfig) -> float:
    """Base of the powers. ``dynamic`` stretches it beyond the declared context only, which no graph goes beyond.

    The formula is written out, for its rounding may move the last place.
    """
    scaling = config.rope_scaling
    if scaling is None or scaling.kind != "dynamic":
        return config.rope_theta
    longest = scaling.original_max_positions
    stretch = scaling.factor * longest / longest - (scaling.factor - 1)
    return config.rope_theta * float(stretch ** (config.head_dim / (config.head_dim - 2)))


def llama3_frequencies(inverse: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Llama 3.1: between stretched and untouched frequencies, in transformers' order of steps."""
    low, high, trained = scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_max_positions
    wavelength = 2 * math.pi / inverse
    share = (trained / wavelength - low) / (high - low)
    mixed = (1 - share) * inverse / scaling.factor + share * inverse
    mixed = torch.where(wavelength > trained / low, inverse / scaling.factor, mixed)
    return torch.where(wavelength < trained / high, inverse, mixed)


def _yarn(periods: torch.Tensor, config: TeacherConfig, scaling: RopeScaling) -> torch.Tensor:
    """YaRN (Peng et al., 2309.00071): a ramp over the dimensions, in transformers' order of steps."""
    size, first = config.head_dim, scaling.original_max_positions

    def dimension(turns: float) -> float:
        """The dimension with so many turns within the first context."""
        return (size * math.log(first / (turns * 2 * math.pi))) / (2 * math.log(config.rope_theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    high += 0.001 * (low == high)
    unscaled = 1 - ((torch.arange(size // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return 1.0 / (scaling.factor * periods) * (1 - unscaled) + 1.0 / periods * unscaled


def rope_tables(config: TeacherConfig, positions: int) -> tuple[np.ndarray, np.ndarray]:
    """Cosine and sine, each float32 [positions, head_dim], in rotate-half form: the two halves are equal.

    Angles are float32 products, as in transformers, and torch takes the cosines; so the tables equal
    ``LlamaRotaryEmbedding``'s on the same machine.
    """
    # P positions, F frequencies = head_dim / 2.
    inverse_F = torch.from_numpy(rope_frequencies(config)).float()
    angles_PF = torch.arange(positions, dtype=torch.float32)[:, None] * inverse_F
    angles = torch.cat((angles_PF, angles_PF), dim=-1)
    scale = config.rope_scaling.attention_factor if config.rope_scaling else 1.0
    return (angles.cos() * scale).numpy(), (angles.sin() * scale).numpy()
