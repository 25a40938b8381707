"""A Llama checkpoint as a GGUF file, every matrix in one of llama.cpp's formats (package gguf)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from draftwood.compiler.checkpoints.weight import shapes_of
from draftwood.compiler.teachers.checkpoint import Checkpoint
from draftwood.errors import RequestError

if TYPE_CHECKING:
    from gguf import GGUFWriter

    from draftwood.compiler.teachers.config import TeacherConfig

# llama.cpp's names of a block's tensors, by Hugging Face's.
_BLOCK = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
_ENDS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_gguf(teacher: Checkpoint, path: Path, form: str) -> None:
    """Writes the file whole; ``form`` is Q8_0 or Q4_0. Tokens have texts where ``tokenizer.json`` is byte-level BPE.

    Raises:
        RequestError: a teacher other than a plain Llama.
    """
    import gguf

    config = teacher.config
    if config.family != "llama" or config.qkv_bias or config.o_bias or config.rope_scaling:
        raise RequestError(f"{teacher.path}: expected a Llama without biases and stretched positions")
    kind, part = gguf.GGMLQuantizationType[form], path.with_suffix(".partial")
    file = gguf.GGUFWriter(part, "llama")
    file.add_context_length(config.max_positions)
    file.add_embedding_length(config.hidden)
    file.add_block_count(config.layers)
    file.add_feed_forward_length(config.intermediate)
    file.add_head_count(config.heads)
    file.add_head_count_kv(config.kv_heads)
    file.add_key_length(config.head_dim)
    file.add_value_length(config.head_dim)
    file.add_rope_dimension_count(config.head_dim)
    file.add_rope_freq_base(config.rope_theta)
    file.add_layer_norm_rms_eps(config.rms_norm_eps)
    file.add_vocab_size(config.vocabulary)
    file.add_file_type(gguf.LlamaFileType[f"MOSTLY_{form}"])
    _write_tokenizer(file, teacher.path / "tokenizer.json", config)
    for name in shapes_of(teacher.parts):
        value = _value(teacher, name)
        plain = value.ndim == 1
        stored = value if plain else gguf.quants.quantize(value, kind)
        file.add_tensor(_theirs(name), stored, raw_dtype=None if plain else kind)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    part.rename(path)


def _write_tokenizer(file: GGUFWriter, path: Path, config: TeacherConfig) -> None:
    """The tokens' texts, which llama-server wants, or that there are none: ids go in and come out then."""
    import gguf

    read = json.loads(path.read_bytes()) if path.is_file() else {}
    model = read.get("model", {})
    if model.get("type") != "BPE" or "ByteLevel" not in json.dumps(read.get("pre_tokenizer")):
        file.add_tokenizer_model("none")
        return
    kinds = dict.fromkeys(model["vocab"].values(), gguf.TokenType.NORMAL)
    kinds |= {token["id"]: gguf.TokenType.CONTROL for token in read["added_tokens"]}
    texts = {id_: text for text, id_ in model["vocab"].items()}
    texts |= {token["id"]: token["content"] for token in read["added_tokens"]}
    file.add_tokenizer_model("gpt2")
    file.add_tokenizer_pre("smollm")  # digits one by one, as the demo's; prompts may be given as ids
    ids = range(config.vocabulary)
    file.add_token_list([texts.get(id_, f"[PAD{id_}]") for id_ in ids])
    file.add_token_types([kinds.get(id_, gguf.TokenType.UNUSED) for id_ in ids])
    file.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]])
    file.add_add_bos_token(False)
    if config.eos:
        file.add_eos_token_id(min(config.eos))


def _theirs(name: str) -> str:
    module, _, kind = name.rpartition(".")
    if module in _ENDS:
        return f"{_ENDS[module]}.{kind}"
    layer, _, within = module.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{_BLOCK[within]}.{kind}"


def _value(teacher: Checkpoint, name: str) -> NDArray[np.float32]:
    value: NDArray[np.float32] = teacher.tensor(name).float().numpy()
    heads = {"q_proj": teacher.config.heads, "k_proj": teacher.config.kv_heads}.get(name.split(".")[-2])
    if heads is None:
        return value
    # llama.cpp turns pairs of neighbours where Hugging Face turns halves.
    halves = value.reshape(heads, 2, -1, value.shape[-1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(value.shape)
