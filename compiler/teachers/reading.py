"""config.json by the names of transformers: the fields that most families spell alike, and those that change the
function."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from draftwood.compiler.checkpoints.fields import Fields
from draftwood.compiler.teachers.config import DType

# Fields known to change the function, with the values (besides null) that leave it alone. All other fields are
# ignored: exporters invent harmless ones daily, and good checkpoints would be refused. A field missing here that adds
# weights is still caught, because unexpected tensors are an error.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu",),
    **dict.fromkeys(("mlp_bias", "use_sliding_window", "qk_layernorm", "use_qk_norm"), (False,)),
    **dict.fromkeys(("is_encoder_decoder", "add_cross_attention"), (False,)),
    # Rotary over neighbours instead of halves, as transformers and the drafters' servers spell it.
    **dict.fromkeys(("rope_interleaved", "rope_interleave"), (False,)),
    **dict.fromkeys(("is_causal", "is_neox_style", "rope_is_neox_style"), (True,)),
    "per_layer_config": ({},),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), (0,)),
    **dict.fromkeys(("pretraining_tp", "partial_rotary_factor", "logits_scaling", "logit_scale"), (1,)),
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier"), (1,)),
    **dict.fromkeys(("sliding_window", "attention_chunk_size"), ()),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), ()),
    **dict.fromkeys(("attention_multiplier", "query_pre_attn_scalar"), ()),
}


def without(*names: str) -> dict[str, tuple[object, ...]]:
    """``NEUTRAL`` less the fields that a family has a form of, or that its own class does not read."""
    return {name: values for name, values in NEUTRAL.items() if name not in names}


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


def refuse_unsupported(
    fields: Fields,
    neutral: Mapping[str, tuple[object, ...]] = NEUTRAL,
    layer_types: tuple[str, ...] = ("full_attention",),
) -> None:
    """Refuses by its name every field that changes the function of a block."""
    for name, values in neutral.items():
        if fields.get(name) is not None and fields.get(name) not in values:
            accepted = " or ".join(repr(value) for value in values) or "null"
            fields.fail(name, f"{accepted} or no such field; the compiler has no other form of it")
    kinds = fields.get("layer_types", [])
    if not isinstance(kinds, list) or any(kind not in layer_types for kind in kinds):
        fields.fail("layer_types", f"{' or '.join(map(repr, layer_types))} in every layer")


def declared_dtype(fields: Fields) -> DType:
    """Element type of the weights as config.json has it, float32 if it says nothing."""
    name = "dtype" if fields.get("dtype") is not None else "torch_dtype"
    value = str(fields.get(name, "float32")).removeprefix("torch.")
    if value not in ("float32", "bfloat16", "float16"):
        fields.fail(name, "float32, bfloat16 or float16")
    return cast(DType, value)
