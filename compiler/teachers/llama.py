"""Llama: pre-norm, RMSNorm, rotate-half rotary, grouped queries, SwiGLU (Touvron et al., 2023)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from draftwood.compiler.checkpoints.fields import Fields
from draftwood.compiler.checkpoints.weight import WeightParts
from draftwood.compiler.teachers.config import TeacherConfig
from draftwood.compiler.teachers.family import Family
from draftwood.compiler.teachers.reading import NEUTRAL, declared_dtype, dimensions, refuse_unsupported
from draftwood.compiler.teachers.rope_fields import reach, read_rope

# H hidden, I intermediate, Q width of all query heads, K width of all key/value heads, V vocabulary


class Llama(Family):
    """``LlamaForCausalLM``, and the parts that its relatives share with it."""

    name = "llama"
    architecture = "LlamaForCausalLM"
    model_types: ClassVar[tuple[str, ...]] = ("llama",)
    # Fields that change the function, with the values that do not; a relative that has the function takes them out.
    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = NEUTRAL
    layer_types: ClassVar[tuple[str, ...]] = ("full_attention",)
    # Base of the rotary frequencies if config.json names none.
    default_theta: ClassVar[float] = 10_000.0
    # The defaults of the family's own configuration class for fields that config.json leaves out; null stays null.
    defaults: ClassVar[Mapping[str, object]] = {"bos_token_id": 1, "eos_token_id": 2}

    def values(self, fields: Fields) -> dict[str, Any]:
        fields = Fields(fields.path, {**self.defaults, **fields.values})
        refuse_unsupported(fields, self.neutral, self.layer_types)
        qkv_bias, o_bias = self.biases(fields)
        theta, scaling = read_rope(fields, self.default_theta)
        sizes = dimensions(fields)
        longest, window = reach(sizes["max_positions"], scaling), self.window(fields)
        if window is not None and window < 1:
            fields.fail("sliding_window", "1 or more, or null")
        return {
            "family": self.name,
            **sizes,
            # In a text no longer than its window a row sees all that is before it: so a window is honoured.
            "max_positions": min(window or longest, longest),
            "rms_norm_eps": fields.number("rms_norm_eps"),
            "rope_theta": theta,
            "rope_scaling": scaling,
            "qkv_bias": qkv_bias,
            "o_bias": o_bias,
            "tied": fields.flag("tie_word_embeddings", False),
            "dtype": declared_dtype(fields),
            "bos": next(iter(fields.tokens("bos_token_id", None)), None),
            "eos": fields.tokens("eos_token_id", None),
        }

    def biases(self, fields: Fields) -> tuple[bool, bool]:
        """Whether q, k and v have a bias, and whether o has; transformers' LlamaAttention has one switch for all."""
        bias = fields.flag("attention_bias", False)
        return bias, bias

    def window(self, fields: Fields) -> int | None:
        """How many tokens the layer that sees least sees, itself counted; None if all see everything."""
        return None

    def parts(self, config: TeacherConfig) -> dict[str, WeightParts]:
        V, H = config.vocabulary, config.hidden
        parts = {"embed.weight": WeightParts((("model.embed_tokens.weight", (V, H)),))}
        for i in range(config.layers):
            parts |= self.layer_parts(config, f"layers.{i}", f"model.layers.{i}")
        parts["norm.weight"] = WeightParts((("model.norm.weight", (H,)),))
        if not config.tied:
            parts["lm_head.weight"] = WeightParts((("lm_head.weight", (V, H)),))
        return parts

    def layer_parts(self, config: TeacherConfig, ours: str, theirs: str) -> dict[str, WeightParts]:
        """The weights of one block."""
        H, I = config.hidden, config.intermediate  # noqa: E741
        Q, K = config.heads * config.head_dim, config.kv_heads * config.head_dim
        rows = {"q": Q, "k": K, "v": K}
        attention, mlp = f"{theirs}.self_attn", f"{theirs}.mlp"
        parts = {f"{ours}.attn_norm.weight": WeightParts(((f"{theirs}.input_layernorm.weight", (H,)),))}
        parts[f"{ours}.qkv.weight"] = WeightParts(
            tuple((f"{attention}.{p}_proj.weight", (n, H)) for p, n in rows.items())
        )
        if config.qkv_bias:
            parts[f"{ours}.qkv.bias"] = WeightParts(
                tuple((f"{attention}.{p}_proj.bias", (n,)) for p, n in rows.items())
            )
        parts[f"{ours}.o.weight"] = WeightParts(((f"{attention}.o_proj.weight", (H, Q)),))
        if config.o_bias:
            parts[f"{ours}.o.bias"] = WeightParts(((f"{attention}.o_proj.bias", (H,)),))
        parts[f"{ours}.mlp_norm.weight"] = WeightParts(((f"{theirs}.post_attention_layernorm.weight", (H,)),))
        parts[f"{ours}.gate_up.weight"] = WeightParts(tuple((f"{mlp}.{p}_proj.weight", (I, H)) for p in ("gate", "up")))
        parts[f"{ours}.down.weight"] = WeightParts(((f"{mlp}.down_proj.weight", (H, I)),))
        return parts

    def ignores(self, config: TeacherConfig, name: str) -> bool:
        # A tied teacher's head has the embedding's numbers, or the teacher is not tied (`Folder.open`). Medusa-1.0
        # keeps a drafter's heads in the teacher's folder.
        of_others = name.endswith(".rotary_emb.inv_freq") or name.startswith("medusa_head.")
        return of_others or (config.tied and name == "lm_head.weight")


LLAMA = Llama()
