"""The families that are a Llama but for a few answers: the place of a bias, the reach of a window, the MLPs that are
mixtures.

A window is honoured by serving texts that fit into it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from draftwood.compiler.checkpoints.fields import Fields
from draftwood.compiler.checkpoints.weight import WeightParts
from draftwood.compiler.teachers.config import TeacherConfig
from draftwood.compiler.teachers.experts import MixtureConfig, MixtureDecoder, with_mixture
from draftwood.compiler.teachers.llama import Llama
from draftwood.compiler.teachers.reading import without

_SLIDING = "sliding_attention"
_EXPERTS = ("num_experts", "num_local_experts")  # as published, and as transformers 5 writes it


class Pangu(Llama):
    """openPangu Embedded, a bias everywhere in the attention; its class comes with the checkpoint: any ``model_type``
    will do."""

    name = "pangu-embedded"
    architecture = "PanguEmbeddedForCausalLM"
    model_types = ()
    defaults: ClassVar[Mapping[str, object]] = {"rope_theta": 1.6e7, "bos_token_id": 1, "eos_token_id": 45892}

    def biases(self, fields: Fields) -> tuple[bool, bool]:
        bias = fields.flag("bias", fields.flag("attention_bias", True))
        if fields.flag("attention_bias", bias) != bias:
            fields.fail("attention_bias", f"the same as bias, {bias}")
        return bias, bias


class Mistral(Llama):
    """Rows may see a window of the text only (v0.1; Jiang et al., 2310.06825)."""

    name = "mistral"
    architecture = "MistralForCausalLM"
    model_types = ("mistral",)
    neutral = without("sliding_window")
    defaults: ClassVar[Mapping[str, object]] = {
        "num_key_value_heads": 8, "sliding_window": 4096, "bos_token_id": 1, "eos_token_id": 2
    }  # fmt: skip

    def biases(self, fields: Fields) -> tuple[bool, bool]:
        return False, False

    def window(self, fields: Fields) -> int | None:
        return None if fields.get("sliding_window") is None else fields.whole("sliding_window")


class Mixtral(Mistral):
    """A mixture in every layer; the shares of the chosen experts always add up to 1 (Jiang et al., 2401.04088)."""

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
        values = super().values(fields)
        fields = Fields(fields.path, {**self.defaults, **fields.values})
        return values | {
            "experts": fields.whole("num_local_experts"),
            "experts_per_token": fields.whole("num_experts_per_tok"),
            "expert_intermediate": values["intermediate"],
            "shares_normalised": True,
            "dense_layers": (),
        }

    def layer_parts(self, config: TeacherConfig, ours: str, theirs: str) -> dict[str, WeightParts]:
        parts = super().layer_parts(config, ours, theirs)
        return with_mixture(parts, config, ours, f"{theirs}.block_sparse_moe", ("w1", "w3", "w2"))


class Qwen2(Llama):
    """Qwen2 and Qwen2.5: a bias on q, k and v (2407.10671)."""

    name = "qwen2"
    architecture = "Qwen2ForCausalLM"
    model_types = ("qwen2",)
    neutral = without("sliding_window", "use_sliding_window")
    layer_types: ClassVar[tuple[str, ...]] = ("full_attention", _SLIDING)
    defaults: ClassVar[Mapping[str, object]] = {
        "num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28
    }  # fmt: skip

    def biases(self, fields: Fields) -> tuple[bool, bool]:
        return True, False

    def window(self, fields: Fields) -> int | None:
        """Published folders name a window but switch it off; only the last layers would have it."""
        used = fields.flag("use_sliding_window", False) and fields.get("sliding_window") is not None
        windowed = used and fields.whole("max_window_layers") < fields.whole("num_hidden_layers")
        if _SLIDING not in fields.get("layer_types", [_SLIDING] * windowed):
            return None
        if not used:
            fields.fail("layer_types", f"no {_SLIDING!r} where use_sliding_window and sliding_window are off")
        return fields.whole("sliding_window")


class Qwen3(Qwen2):
    """Dense: queries and keys are normalised head by head before rotary (2505.09388)."""

    name = "qwen3"
    architecture = "Qwen3ForCausalLM"
    model_types = ("qwen3",)
    defaults: ClassVar[Mapping[str, object]] = {**Qwen2.defaults, "head_dim": 128}

    def values(self, fields: Fields) -> dict[str, Any]:
        return super().values(fields) | {"qk_norm": True}

    def biases(self, fields: Fields) -> tuple[bool, bool]:
        return Llama.biases(self, fields)

    def layer_parts(self, config: TeacherConfig, ours: str, theirs: str) -> dict[str, WeightParts]:
        norms = {side: f"{theirs}.self_attn.{side}_norm.weight" for side in ("q", "k")}
        parts = {
            f"{ours}.{side}_norm.weight": WeightParts(((name, (config.head_dim,)),)) for side, name in norms.items()
        }
        return super().layer_parts(config, ours, theirs) | parts


class Qwen3Moe(Qwen3):
    """30B-A3B, 235B-A22B and their relatives: ``mlp_only_layers`` and ``decoder_sparse_step`` name the layers that
    have a plain MLP (2505.09388)."""

    name = "qwen3-moe"
    architecture = "Qwen3MoeForCausalLM"
    model_types = ("qwen3_moe",)
    neutral = without("sliding_window", "use_sliding_window", *_EXPERTS) | {"shared_expert_intermediate_size": (0,)}
    layer_types = ("full_attention",)
    config = MixtureConfig
    decoder = MixtureDecoder
    defaults: ClassVar[Mapping[str, object]] = {
        "num_key_value_heads": 4, "sliding_window": 4096, "decoder_sparse_step": 1, "mlp_only_layers": (),
        "moe_intermediate_size": 768, "num_experts_per_tok": 8, "norm_topk_prob": False,
    }  # fmt: skip

    def values(self, fields: Fields) -> dict[str, Any]:
        values = super().values(fields)
        fields = Fields(fields.path, {**self.defaults, **fields.values})
        named = [fields.whole(name) for name in _EXPERTS if fields.get(name) is not None] or [128]
        if len(set(named)) > 1:
            fields.fail(_EXPERTS[0], f"the same as {_EXPERTS[1]}, {named[1]}")
        return values | {
            "experts": named[0],
            "experts_per_token": fields.whole("num_experts_per_tok"),
            "expert_intermediate": fields.whole("moe_intermediate_size"),
            "shares_normalised": fields.flag("norm_topk_prob", False),
            "dense_layers": _dense_layers(fields, values["layers"]),
        }

    def window(self, fields: Fields) -> int | None:
        """A window that is switched on holds for every layer."""
        used = fields.flag("use_sliding_window", False) and fields.get("sliding_window") is not None
        return fields.whole("sliding_window") if used else None

    def layer_parts(self, config: TeacherConfig, ours: str, theirs: str) -> dict[str, WeightParts]:
        parts = super().layer_parts(config, ours, theirs)
        return with_mixture(parts, config, ours, f"{theirs}.mlp", ("gate_proj", "up_proj", "down_proj"))


def _dense_layers(fields: Fields, layers: int) -> tuple[int, ...]:
    named, every = fields.get("mlp_only_layers", ()), fields.whole("decoder_sparse_step")
    if not isinstance(named, list | tuple) or any(type(layer) is not int for layer in named):
        fields.fail("mlp_only_layers", "a list of layers")
    if every < 1:
        fields.fail("decoder_sparse_step", "1 or more")
    return tuple(i for i in range(layers) if i in named or (i + 1) % every)
