"""A GGUF file's metadata as config.json would say it, and its tensors' names as transformers has them.

Keys and their defaults: llama.cpp's src/llama-model.cpp; names: its gguf-py/gguf/tensor_mapping.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch

from draftwood.compiler.checkpoints.fields import Fields
from draftwood.compiler.checkpoints.gguf_header import CONTROL, USER_DEFINED, Header
from draftwood.compiler.teachers.config import RopeScaling
from draftwood.compiler.teachers.rope import llama3_frequencies
from draftwood.errors import CheckpointError

# By architecture: the class and the model type of transformers.
_CLASSES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
    "glm4": ("Glm4ForCausalLM", "glm4"),
}
_MIXTRAL = ("MixtralForCausalLM", "mixtral")
# Keys of an architecture that are read, and those that no block of ours and of llama.cpp's depends on.
_READ = frozenset({
    "context_length", "embedding_length", "block_count", "feed_forward_length", "expert_feed_forward_length",
    "expert_count", "expert_used_count", "attention.head_count", "attention.head_count_kv", "attention.key_length",
    "attention.value_length", "attention.layer_norm_rms_epsilon", "attention.sliding_window", "rope.dimension_count",
    "rope.freq_base", "rope.scale_linear", "rope.scaling.type", "rope.scaling.factor", "rope.scaling.attn_factor",
    "rope.scaling.original_context_length", "rope.scaling.yarn_attn_factor", "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow", "rope.scaling.yarn_ext_factor", "rope.scaling.yarn_log_multiplier",
})  # fmt: skip
_INERT = frozenset({
    "vocab_size", "tensor_data_layout", "rope.scaling.finetuned", "attention.layer_norm_epsilon", "pooling_type",
})  # fmt: skip
# Values of further keys that leave the function alone; of those not named here it is 0.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("logit_scale", "embedding_scale", "residual_scale", "expert_weights_scale"), (0, 1)),
    **dict.fromkeys(("expert_group_count", "expert_group_used_count"), (0, 1)),
    **dict.fromkeys(("attention.causal", "expert_weights_norm"), (True,)),
    "expert_gating_func": (0, 1),  # softmax
    "hidden_activation": ("silu",),
}
_BLOCK = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp", "block_sparse_moe.gate": "ffn_gate_inp",
    "mlp.gate_up_proj": "ffn_up", "post_self_attn_layernorm": "post_attention_norm",
    "post_mlp_layernorm": "post_ffw_norm",
}  # fmt: skip
_EXPERT = {
    "gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps",
    "w1": "ffn_gate_exps", "w3": "ffn_up_exps", "w2": "ffn_down_exps",
}  # fmt: skip
_ENDS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
# Added tokens that end a text, as in llama.cpp's src/llama-vocab.cpp: a file has one key for all that the publisher's
# generation_config.json lists. Qwen's vocabulary has </s> as a word, which ends no text there.
_END_TEXTS = (
    "</s>", "<eos>", "[EOS]", "<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|end|>", "<|eot_id|>", "<|eom_id|>",
    "<EOT>", "[EOT]", "<end_of_turn>", "<end_of_utterance>",
)  # fmt: skip
# GLM-4 ends its answer by the role that speaks next.
_END_ROLES = {"glm4": ("<|user|>", "<|observation|>")}
_INSIDE = re.compile(r"model\.layers\.(\d+)\.(.+?)(?:\.experts\.(\d+)\.(\w+))?")
ROPE_FACTORS = "rope_freqs.weight"
# Llama 3's rope. Its factor stretches long wavelengths, and is the only one of the four that varies.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
# Largest relative difference of a file's float32 factors from its rope's.
_ROPE_ERROR = 1e-5


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """A tensor of the file, or one of the experts that are stacked in it."""

    name: str
    expert: int | None = None


def place_of(name: str) -> TensorPlace:
    """The file's place for a tensor of transformers' name."""
    module, _, kind = name.rpartition(".")
    if module in _ENDS:
        return TensorPlace(f"{_ENDS[module]}.{kind}")
    match = _INSIDE.fullmatch(module)
    assert match is not None, name
    block, inside, expert, part = match.groups()
    if expert is not None:
        return TensorPlace(f"blk.{block}.{_EXPERT[part]}.{kind}", int(expert))
    return TensorPlace(f"blk.{block}.{_BLOCK[inside]}.{kind}")


def turned(architecture: str, place: TensorPlace) -> bool:
    """Whether rows of a query or key stand in the file as pairs of neighbours that rotary turns, not as halves."""
    return architecture == "llama" and re.fullmatch(r"blk\.\d+\.attn_[qk]\.(weight|bias)", place.name) is not None


def description(header: Header, rope_factors: torch.Tensor | None) -> dict[str, Any]:
    """config.json of a file's metadata.

    Raises:
        CheckpointError: an architecture or a key that there is no form of here, or a key that is missing.
    """
    fields = Fields(header.path, dict(header.fields))
    architecture = fields.get("general.architecture")
    if architecture not in _CLASSES:
        fields.fail("general.architecture", f"one of {', '.join(_CLASSES)}; no other is supported")
    keys = _Keys(fields, architecture)
    keys.refuse_unsupported()
    experts, layers = keys.whole("expert_count", 0), keys.whole("block_count")
    # Names are made by these numbers, so the file must have as many.
    if layers > len(header.tensors):
        keys.fail("block_count", f"at most as many as there are tensors, {len(header.tensors)}")
    stacks = [stored.shape[0] for name, stored in header.tensors.items() if name.endswith("_exps.weight")]
    if experts and set(stacks) != {experts}:
        keys.fail("expert_count", f"as many as are stacked in a tensor, {stacks[0] if stacks else 0}")
    title, kind = _MIXTRAL if architecture == "llama" and experts else _CLASSES[architecture]
    heads, hidden = keys.whole("attention.head_count"), keys.whole("embedding_length")
    context = keys.whole("context_length")
    head_dim = keys.head_dim(heads, hidden)
    described = {
        "architectures": [title],
        "model_type": kind,
        "hidden_size": hidden,
        "intermediate_size": keys.whole("feed_forward_length", keys.whole("expert_feed_forward_length", 0)),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys.whole("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "vocab_size": _vocabulary(header),
        # In a text no longer than its window a row sees all that is before it.
        "max_position_embeddings": min(context, keys.whole("attention.sliding_window", 0) or context),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": keys.number("rope.freq_base", 10_000.0),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "torch_dtype": "float32",
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": end_ids(header) or None,
    }
    scaling = keys.rope_scaling(context)
    if scaling and rope_factors is not None:
        keys.fail("rope.scaling.type", f"none with {ROPE_FACTORS}")
    if scaling := scaling or _llama3(header, head_dim, described["rope_theta"], rope_factors):
        described["rope_scaling"] = scaling
        if scaling["rope_type"] == "yarn" and keys.get("attention.sliding_window"):
            keys.fail("rope.scaling.type", "none with a sliding window, which ends before yarn's context")
    if architecture == "glm4":
        described["partial_rotary_factor"] = keys.whole("rope.dimension_count") / max(head_dim, 1)
    return described | (_experts(keys, title, experts) if experts else {})


class _Keys:
    """The keys of the file's architecture."""

    def __init__(self, fields: Fields, architecture: str) -> None:
        self.fields, self.prefix = fields, architecture

    def get(self, name: str) -> Any:
        return self.fields.get(f"{self.prefix}.{name}")

    def whole(self, name: str, default: int | None = None) -> int:
        return self.fields.whole(f"{self.prefix}.{name}", default)

    def number(self, name: str, default: float | None = None) -> float:
        return self.fields.number(f"{self.prefix}.{name}", default)

    def fail(self, name: str, expected: str) -> Any:
        return self.fields.fail(f"{self.prefix}.{name}", expected)

    def refuse_unsupported(self) -> None:
        """Raises CheckpointError for an unsupported key that may change the function."""
        for key, value in self.fields.values.items():
            name = key.removeprefix(f"{self.prefix}.")
            if name == key or name in _READ or name in _INERT:
                continue
            neutral = _NEUTRAL.get(name, (0,))
            if value not in neutral:
                accepted = " or ".join(map(repr, neutral))
                self.fail(name, f"{accepted} or no such key; the compiler has no other form of it")

    def head_dim(self, heads: int, hidden: int) -> int:
        if self.get("attention.key_length") is None and (heads < 1 or hidden % heads):
            self.fail("embedding_length", f"a multiple of attention.head_count ({heads}), or attention.key_length")
        size = self.whole("attention.key_length", hidden // max(heads, 1))
        if self.whole("attention.value_length", size) != size:
            self.fail("attention.value_length", f"the same as attention.key_length, {size}")
        if self.prefix != "glm4" and self.whole("rope.dimension_count", size) != size:
            self.fail("rope.dimension_count", f"the whole head, {size}")
        return size

    def rope_scaling(self, context: int) -> dict[str, Any] | None:
        # As in llama.cpp: a factor without a type is linear, and 0 means none.
        kind = self.fields.get(f"{self.prefix}.rope.scaling.type", "linear")
        factor = self.number("rope.scaling.factor", self.number("rope.scale_linear", 1.0)) or 1.0
        if kind not in ("none", "linear", "yarn"):
            self.fail("rope.scaling.type", "none, linear or yarn")
        for name in ("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor"):
            if self.number(name, 1.0) != 1:
                self.fail(name, "1 or no such key")
        if self.number("rope.scaling.yarn_log_multiplier", 0.0):
            self.fail("rope.scaling.yarn_log_multiplier", "0 or no such key")
        if self.number("rope.scaling.yarn_ext_factor", -1.0) not in (-1.0, 1.0 if kind == "yarn" else 0.0):
            self.fail("rope.scaling.yarn_ext_factor", "1 with yarn, 0 without it, or no such key")
        if kind == "none" or (kind == "linear" and factor == 1):
            return None
        if kind == "linear":
            return {"rope_type": "linear", "factor": factor}
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": self.whole("rope.scaling.original_context_length", context),
            "beta_fast": self.number("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": self.number("rope.scaling.yarn_beta_slow", 1.0),
        }


def _vocabulary(header: Header) -> int:
    """Rows of the embedding, which may have more than the tokenizer has tokens."""
    if "token_embd.weight" not in header.tensors:
        raise CheckpointError(f"{header.path}: no tensor token_embd.weight; expected a whole decoder")
    return header.tensors["token_embd.weight"].shape[0]


def end_ids(header: Header) -> list[Any]:
    """What the file names as the end of a text or a turn, unchecked, and its added tokens that end texts."""
    fields, kinds = header.fields, header.array("tokenizer.ggml.token_type")
    ids = [fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    texts = (*_END_TEXTS, *_END_ROLES.get(str(fields.get("general.architecture")), ()))
    added: tuple[list[int], ...] = ([CONTROL], [USER_DEFINED], [])  # the last: a file without kinds
    ids += [id_ for id_ in header.indices("tokenizer.ggml.tokens", texts) if kinds[id_ : id_ + 1] in added]
    return list(dict.fromkeys(id_ for id_ in ids if id_ is not None))


def _experts(keys: _Keys, title: str, experts: int) -> dict[str, Any]:
    used = keys.whole("expert_used_count")
    if title == _MIXTRAL[0]:
        return {"num_local_experts": experts, "num_experts_per_tok": used}
    return {
        "num_experts": experts,
        "num_experts_per_tok": used,
        "moe_intermediate_size": keys.whole("expert_feed_forward_length"),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _llama3(header: Header, head_dim: int, theta: float, factors: torch.Tensor | None) -> dict[str, Any] | None:
    """The rope of Llama 3, from the divisor of each frequency that a file holds.

    Raises:
        CheckpointError: the factors belong to another rope.
    """
    if factors is None:
        return None
    factor = float(factors.max())
    inverse = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if factors.shape == inverse.shape and 1 <= factor <= 1e6:
        scaling = RopeScaling(
            kind="llama3",
            factor=factor,
            low_freq_factor=_LLAMA3["low_freq_factor"],
            high_freq_factor=_LLAMA3["high_freq_factor"],
            original_max_positions=int(_LLAMA3["original_max_position_embeddings"]),
        )
        if torch.allclose(inverse / factors, llama3_frequencies(inverse, scaling), rtol=_ROPE_ERROR, atol=0.0):
            return {"rope_type": "llama3", "factor": factor, **_LLAMA3}
    raise CheckpointError(
        f"{header.path}: {ROPE_FACTORS} holds {factors.numel()} factors up to {factor:g} that are not Llama 3's for"
        f" heads of {head_dim}; expected low and high_freq_factor 1 and 4 over 8192 tokens; no other is supported"
    )
