"""A teacher's configuration: its dimensions, checked against each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from draftwood.errors import CheckpointError
from draftwood.manifest import TokenRows

DType = Literal["float32", "bfloat16", "float16"]

# Sizes are bounded before anything is listed or allocated by them; no published model comes near.
_MOST = {"layers": 1000, "head_dim": 65536}


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeScaling:
    """The stretching of rotary frequencies; each field after ``factor`` is read by the kinds named."""

    kind: Literal["linear", "dynamic", "llama3", "yarn"]
    # Long wavelengths are stretched by this, >= 1.
    factor: float
    # llama3: a wavelength above original_max_positions / low_freq_factor is stretched in full,
    low_freq_factor: float = 1.0
    # and one below original_max_positions / high_freq_factor not at all.
    high_freq_factor: float = 4.0
    # dynamic, llama3, yarn: context length in tokens that the teacher was first trained with.
    original_max_positions: int = 8192
    # yarn: what turns less often than this within that context is stretched in full,
    beta_slow: float = 1.0
    # and what turns more often than this not at all.
    beta_fast: float = 32.0
    # yarn: whether the two bounds are rounded outwards to whole dimensions.
    truncate: bool = True
    # yarn: cosines and sines are multiplied by this, > 0.
    attention_factor: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedLayer:
    """A linear layer, by our name, that stays packed in four or eight bits a weight. ``zeros``: blocks or groups of
    inputs have zeros other than the middle. ``minimum``: a minimum is added to their weights."""

    name: str
    bits: Literal[4, 8]
    zeros: bool
    minimum: bool = False
    # Inputs that share a scale on an NPU; None for a CPU's blocks of 32.
    group: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TeacherConfig:
    """The dimensions of a teacher, checked against each other.

    Raises:
        CheckpointError: two fields contradict each other; the message names them.
    """

    # Name of its family in the registry.
    family: str
    # Decoder blocks.
    layers: int
    # Width of the residual stream.
    hidden: int
    # Width of the SwiGLU product.
    intermediate: int
    # Query heads; a multiple of kv_heads.
    heads: int
    # Key/value heads; query head q reads key/value head q // (heads / kv_heads).
    kv_heads: int
    # Width of one head, even (rotate-half); heads * head_dim need not equal hidden.
    head_dim: int
    # Rows of the embedding and of the output matrix.
    vocabulary: int
    # Added to the mean square before the root.
    rms_norm_eps: float
    # Base of the rotary frequencies.
    rope_theta: float
    rope_scaling: RopeScaling | None
    # Longest context in tokens that the checkpoint declares.
    max_positions: int
    # Whether the query, key and value projections have a bias,
    qkv_bias: bool
    # and the attention output projection.
    o_bias: bool
    # Whether queries and keys are normalised head by head before rotary.
    qk_norm: bool = False
    # Whether the output matrix is the embedding.
    tied: bool
    # Linear layers, by our names, whose weights are int8 and whose rows are rounded to int8 (W8A8).
    quantised: tuple[str, ...] = ()
    # Layers whose weights stay packed, and whose rows are rounded block by block.
    packed: tuple[PackedLayer, ...] = ()
    # Element type of the stored weights.
    dtype: DType
    # Token that begins a text, if there is one.
    bos: int | None
    # Tokens that end a text; the first is the one that config.json names first.
    eos: tuple[int, ...]

    @property
    def buffers(self) -> tuple[TokenRows, ...]:
        """The memory of a sequence: keys, then values, of every layer."""
        of_layers = (f"{side}_cache.{layer}" for layer in range(self.layers) for side in ("key", "value"))
        return tuple(TokenRows(name=name, heads=self.kv_heads, width=self.head_dim) for name in of_layers)

    def __post_init__(self) -> None:
        sizes = (
            "layers",
            "hidden",
            "intermediate",
            "heads",
            "kv_heads",
            "head_dim",
            "vocabulary",
            "max_positions",
        )
        ids = (*self.eos, *(() if self.bos is None else (self.bos,)))
        for name in sizes:
            most = _MOST.get(name, 2**31 - 1)
            _expect(1 <= getattr(self, name) <= most, name, getattr(self, name), f"1 to {most}")
        _expect(self.heads % self.kv_heads == 0, "heads", self.heads, f"a multiple of kv_heads, {self.kv_heads}")
        _expect(self.head_dim % 2 == 0, "head_dim", self.head_dim, "an even number, for rotate-half rotary")
        _expect(self.rms_norm_eps > 0, "rms_norm_eps", self.rms_norm_eps, "more than 0")
        _expect(self.rope_theta > 0, "rope_theta", self.rope_theta, "more than 0")
        _expect(all(0 <= i < self.vocabulary for i in ids), "bos and eos", ids, f"ids below {self.vocabulary}")
        if self.rope_scaling is not None:
            _check_scaling(self.rope_scaling)
            theta, stretched = self.rope_theta, self.rope_scaling.kind in ("dynamic", "yarn")
            _expect(not stretched or theta > 1, "rope_theta", theta, "more than 1 with such a rope_type")
            _expect(not stretched or self.head_dim > 2, "head_dim", self.head_dim, "at least 4 with such a rope_type")


def _check_scaling(rope: RopeScaling) -> None:
    # Bounds far beyond any published value, within which nothing overflows.
    factors, betas = (rope.low_freq_factor, rope.high_freq_factor), (rope.beta_slow, rope.beta_fast)
    _expect(1 <= rope.factor <= 1e6, "rope factor", rope.factor, "1 to 1e6")
    _expect(0 < factors[0] < factors[1], "rope low and high_freq_factor", factors, "0 < low < high")
    _expect(1e-6 <= betas[0] <= betas[1] <= 1e6, "rope beta_slow and beta_fast", betas, "1e-6 <= slow <= fast <= 1e6")
    _expect(1 <= rope.original_max_positions < 2**31, "rope original_max_positions", rope, "1 to 2147483647")
    _expect(0 < rope.attention_factor <= 1e6, "rope attention_factor", rope.attention_factor, "more than 0, up to 1e6")


def _expect(fits: bool, name: str, got: object, expected: str) -> None:
    if not fits:
        raise CheckpointError(f"{name} is {got}; expected {expected}")
