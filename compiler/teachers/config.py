"""What a teacher is: its dimensions, read from config.json, and the rotary tables that follow from them.

Two families share one block (pre-norm, RMSNorm, rotate-half rotary, SwiGLU): ``LlamaForCausalLM`` and
``PanguEmbeddedForCausalLM``. Whatever else changes the function is refused by the name of its field.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch

from draftwood.compiler.checkpoints.fields import Fields, read_json
from draftwood.errors import CheckpointError

Family = Literal["llama", "pangu-embedded"]
DType = Literal["float32", "bfloat16", "float16"]

_FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": "llama",
    "PanguEmbeddedForCausalLM": "pangu-embedded",
}
# What each family's own configuration class fills in when config.json leaves the field out.
_DEFAULTS: dict[Family, dict[str, Any]] = {
    "llama": {"rope_theta": 10_000.0, "bias": False, "bos_token_id": 1, "eos_token_id": 2},
    "pangu-embedded": {"rope_theta": 1.6e7, "bias": True, "bos_token_id": 1, "eos_token_id": 45892},
}
# Fields known to change the function, with the values (beside null) that leave it alone. All other fields
# are ignored: exporters invent harmless ones daily, so refusing the unknown would refuse good checkpoints.
# A field missing here that adds weights is still caught, because unexpected tensors are an error.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu",),
    **dict.fromkeys(("mlp_bias", "use_sliding_window", "rope_interleaved", "qk_layernorm", "use_qk_norm"), (False,)),
    **dict.fromkeys(("is_encoder_decoder", "add_cross_attention"), (False,)),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), (0,)),
    **dict.fromkeys(("pretraining_tp", "partial_rotary_factor", "logits_scaling", "logit_scale"), (1,)),
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier"), (1,)),
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "quantization_config"), ()),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), ()),
    **dict.fromkeys(("attention_multiplier", "query_pre_attn_scalar"), ()),
}
# Sizes are bounded before anything is listed or allocated by them; no published model comes near.
_MOST = {"layers": 1000, "head_dim": 65536}
_ROPE_FIELDS = {"rope_type", "type", "rope_theta", "factor", "partial_rotary_factor"}
_LLAMA3_FIELDS = {"low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeScaling:
    """How the rotary frequencies are stretched; the last three fields are read by ``llama3`` only."""

    kind: Literal["linear", "llama3"]
    # Long wavelengths are stretched by this, >= 1.
    factor: float
    # A wavelength above original_max_positions / low_freq_factor is stretched in full,
    low_freq_factor: float = 1.0
    # and one below original_max_positions / high_freq_factor not at all.
    high_freq_factor: float = 4.0
    # Context length in tokens that the teacher was first trained with.
    original_max_positions: int = 8192


@dataclass(frozen=True, kw_only=True, slots=True)
class TeacherConfig:
    """The dimensions of a teacher, checked against each other.

    Raises:
        CheckpointError: two fields contradict each other; the message names them.
    """

    family: Family
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
    # Whether the output matrix is the embedding.
    tied: bool
    # Element type of the stored weights.
    dtype: DType
    # Token that begins a text, if there is one.
    bos: int | None
    # Tokens that end a text; the first is the one that config.json names first.
    eos: tuple[int, ...]

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
        if (rope := self.rope_scaling) is not None:
            _expect(rope.factor >= 1, "rope factor", rope.factor, "at least 1")
            factors = (rope.low_freq_factor, rope.high_freq_factor)
            _expect(0 < factors[0] < factors[1], "rope low and high_freq_factor", factors, "0 < low < high")
            _expect(rope.original_max_positions >= 1, "rope original_max_positions", rope, "at least 1")


def _expect(fits: bool, name: str, got: object, expected: str) -> None:
    if not fits:
        raise CheckpointError(f"{name} is {got}; expected {expected}")


def read_config(folder: Path) -> TeacherConfig:
    """Reads the teacher's dimensions from config.json, and more end tokens from generation_config.json.

    Raises:
        CheckpointError: a file is missing or not JSON, or a field does not fit what is supported.
    """
    fields = Fields(folder / "config.json", read_json(folder / "config.json"))
    family = _family(fields)
    refuse_unsupported(fields)
    values = {**dimensions(fields), **switches(fields, family), "family": family}
    if (path := folder / "generation_config.json").is_file():
        values["eos"] += Fields(path, read_json(path)).tokens("eos_token_id", None)
    values["eos"] = tuple(dict.fromkeys(values["eos"]))
    try:
        return TeacherConfig(**values)
    except CheckpointError as error:
        raise CheckpointError(f"{fields.path}: {error}") from None


def dimensions(fields: Fields) -> dict[str, Any]:
    """The sizes of a block and of the whole, by TeacherConfig's names."""
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    if fields.get("head_dim") is None and (heads < 1 or hidden % heads):
        fields.fail("hidden_size", f"a multiple of num_attention_heads ({heads}), or an explicit head_dim")
    return {
        "layers": fields.whole("num_hidden_layers"),
        "hidden": hidden,
        "intermediate": fields.whole("intermediate_size"),
        "heads": heads,
        "kv_heads": fields.whole("num_key_value_heads", heads),
        "head_dim": fields.whole("head_dim", hidden // max(heads, 1)),
        "vocabulary": fields.whole("vocab_size"),
        "max_positions": fields.whole("max_position_embeddings"),
    }


def switches(fields: Fields, family: Family) -> dict[str, Any]:
    """What is no size, by TeacherConfig's names, with the family's own defaults."""
    defaults = _DEFAULTS[family]
    # One switch puts a bias on q, k, v and o alike, in transformers' LlamaAttention as in openPangu.
    bias = fields.flag("attention_bias", defaults["bias"])
    if family == "pangu-embedded" and fields.get("bias") is not None:
        bias = fields.flag("bias", bias)
        if fields.flag("attention_bias", bias) != bias:
            fields.fail("attention_bias", f"the same as bias, {bias}")
    theta, scaling = _rope(fields, defaults["rope_theta"])
    return {
        "rms_norm_eps": fields.number("rms_norm_eps"),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "qkv_bias": bias,
        "o_bias": bias,
        "tied": fields.flag("tie_word_embeddings", False),
        "dtype": _dtype(fields),
        "bos": next(iter(fields.tokens("bos_token_id", defaults["bos_token_id"])), None),
        "eos": fields.tokens("eos_token_id", defaults["eos_token_id"]),
    }


def _family(fields: Fields) -> Family:
    named = fields.get("architectures")
    if not isinstance(named, list) or len(named) != 1 or str(named[0]) not in _FAMILIES:
        fields.fail("architectures", f"one of {', '.join(_FAMILIES)}; no other is supported")
    # A Llama's class is picked by model_type; openPangu's comes with the checkpoint's own code.
    if _FAMILIES[named[0]] == "llama" and fields.get("model_type", "llama") != "llama":
        fields.fail("model_type", "'llama' beside LlamaForCausalLM")
    return _FAMILIES[named[0]]


def refuse_unsupported(fields: Fields) -> None:
    """Refuses by its name every field that changes the function of a block."""
    for name, neutral in _NEUTRAL.items():
        if fields.get(name) is not None and fields.get(name) not in neutral:
            wanted = " or ".join(repr(value) for value in neutral) or "null"
            fields.fail(name, f"{wanted} or no such field; the compiler has no other form of it")
    kinds = fields.get("layer_types", [])
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        fields.fail("layer_types", "'full_attention' in every layer")


def _dtype(fields: Fields) -> DType:
    name = "dtype" if fields.get("dtype") is not None else "torch_dtype"
    value = str(fields.get(name, "float32")).removeprefix("torch.")
    if value not in ("float32", "bfloat16", "float16"):
        fields.fail(name, "float32, bfloat16 or float16")
    return cast(DType, value)


def _rope(fields: Fields, default_theta: float) -> tuple[float, RopeScaling | None]:
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
