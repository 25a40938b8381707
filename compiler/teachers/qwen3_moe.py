"""Qwen3 with a mixture of experts: 30B-A3B, 235B-A22B and their relatives (2505.09388)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from draftwood.compiler.checkpoints.fields import Fields
from draftwood.compiler.checkpoints.weight import Parts
from draftwood.compiler.teachers.config import TeacherConfig
from draftwood.compiler.teachers.experts import MixtureConfig, MixtureDecoder, mixture_parts
from draftwood.compiler.teachers.qwen3 import Qwen3
from draftwood.compiler.teachers.reading import without

_EXPERTS = ("num_experts", "num_local_experts")  # as published, and as transformers 5 writes it


class Qwen3Moe(Qwen3):
    """``Qwen3MoeForCausalLM``; layers that ``mlp_only_layers`` or ``decoder_sparse_step`` name have a plain MLP."""

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
        found = super().values(fields)
        fields = Fields(fields.path, {**self.defaults, **fields.values})
        named = [fields.whole(name) for name in _EXPERTS if fields.get(name) is not None] or [128]
        if len(set(named)) > 1:
            fields.fail(_EXPERTS[0], f"the same as {_EXPERTS[1]}, {named[1]}")
        return found | {
            "experts": named[0],
            "experts_per_token": fields.whole("num_experts_per_tok"),
            "expert_intermediate": fields.whole("moe_intermediate_size"),
            "shares_normalised": fields.flag("norm_topk_prob", False),
            "dense_layers": _dense_layers(fields, found["layers"]),
        }

    def window(self, fields: Fields) -> int | None:
        """Where a window is switched on, every layer has it."""
        used = fields.flag("use_sliding_window", False) and fields.get("sliding_window") is not None
        return fields.whole("sliding_window") if used else None

    def layer_parts(self, config: TeacherConfig, ours: str, theirs: str) -> dict[str, Parts]:
        assert isinstance(config, MixtureConfig)
        found = super().layer_parts(config, ours, theirs)
        if int(ours.rpartition(".")[2]) in config.dense_layers:
            return found
        plain = (f"{ours}.gate_up.weight", f"{ours}.down.weight")
        mixture = mixture_parts(config, ours, f"{theirs}.mlp", ("gate_proj", "up_proj", "down_proj"))
        return {name: parts for name, parts in found.items() if name not in plain} | mixture


def _dense_layers(fields: Fields, layers: int) -> tuple[int, ...]:
    named, every = fields.get("mlp_only_layers", ()), fields.whole("decoder_sparse_step")
    if not isinstance(named, list | tuple) or any(type(layer) is not int for layer in named):
        fields.fail("mlp_only_layers", "a list of layers")
    if every < 1:
        fields.fail("decoder_sparse_step", "1 or more")
    return tuple(i for i in range(layers) if i in named or (i + 1) % every)


QWEN3_MOE = Qwen3Moe()
