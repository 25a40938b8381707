"""GGUF files of tiny teachers, made with the package's own writer, names and blocks."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

_KIND = {name: name for name in ("llama", "qwen2", "qwen3", "glm4")} | {"mixtral": "llama", "qwen3_moe": "qwen3moe"}
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(.+)")
# Where the halves of a block are, which random bytes would make no number; else it begins with one.
HALVES = {
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)), "Q6_K": (208,), "Q2_K": (80, 82), "Q3_K": (108,)
}  # fmt: skip
# The package reads these and writes none.
_READ_ONLY = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")
_SPREAD = 0.12


def save_gguf(
    folder: Path,
    path: Path,
    kind: str = "F32",
    *,
    tensors_a_file: int = 0,
    held: Mapping[str, NDArray[np.float32]] | None = None,
    **more: object,
) -> None:
    """The teacher of a Hugging Face folder as a file, or in files of so many tensors, with its matrices in blocks of a
    kind. ``more`` are metadata that replace those of the teacher, ``held`` tensors in the place of all of its own. Of a
    kind that the package does not write they are random."""
    config = json.loads((folder / "config.json").read_text())
    architecture = _KIND[config["model_type"]]
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=tensors_a_file)
    _write_config(writer, config, architecture)
    _write_tokenizer(writer, folder / "tokenizer.json", config["vocab_size"])
    for key, value in more.items():
        for written in writer.kv_data:
            written.pop(key, None)
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    for seed, (name, value) in enumerate((held or tensors(folder, config, architecture)).items()):
        whole = value.ndim == 1 or name.endswith("inp.weight")
        block = gguf.GGMLQuantizationType["F32" if whole else kind]
        writer.add_tensor(name, _stored(value, block, seed), raw_dtype=block)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _stored(value: NDArray[np.float32], block: gguf.GGMLQuantizationType, seed: int) -> NDArray[Any]:
    if block.name == "F32":
        return value
    if block.name not in _READ_ONLY:
        return gguf.quants.quantize(value, block)
    return random_blocks(block.name, value.shape, seed)


def random_blocks(kind: str, shape: tuple[int, ...], seed: int = 0) -> NDArray[np.uint8]:
    """Bytes of rows of blocks that stand for numbers of a weight's size."""
    random, block = np.random.default_rng(seed), gguf.GGMLQuantizationType[kind]
    numbers, size = gguf.GGML_QUANT_SIZES[block]
    held = random.integers(0, 256, (*shape[:-1], shape[-1] // numbers, size), np.uint8)

    def scaled(by: float) -> NDArray[np.uint8]:
        for at in HALVES.get(kind, (0,)):
            half = (by * np.random.default_rng(at).standard_normal((*held.shape[:-1], 1))).astype(np.float16)
            held[..., at : at + 2] = half.view(np.uint8)
        return held.reshape(*shape[:-1], -1)

    return scaled(_SPREAD * 1e-2 / float(gguf.dequantize(scaled(1e-2), block).std()))


def tensors_of(folder: Path) -> dict[str, NDArray[np.float32]]:
    """The tensors of a Hugging Face folder as a file holds them."""
    config = json.loads((folder / "config.json").read_text())
    return tensors(folder, config, _KIND[config["model_type"]])


def tensors(folder: Path, config: dict[str, Any], architecture: str) -> dict[str, NDArray[np.float32]]:
    """By the file's names, as llama.cpp's converter has them: experts stacked, and a Llama's pairs side by side."""
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    held: dict[str, Any] = {}
    for name, value in sorted(load_file(folder / "model.safetensors").items()):
        if match := _EXPERT.fullmatch(name):
            held.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = value
        else:
            held[name] = value
    found = {}
    for name, value in held.items():
        whole = np.stack([value[i] for i in range(len(value))]) if isinstance(value, dict) else value
        if architecture == "llama" and (side := re.search(r"\.([qk])_proj\.", name)):
            heads = config["num_attention_heads" if side[1] == "q" else "num_key_value_heads"]
            whole = whole.reshape(heads, 2, -1, *whole.shape[1:]).swapaxes(1, 2).reshape(whole.shape)
        module, _, kind = name.rpartition(".")
        found[f"{names.get_name(module)}.{kind}"] = np.ascontiguousarray(whole, np.float32)
    return found | _rope_factors(config)


def _rope_factors(config: dict[str, Any]) -> dict[str, NDArray[np.float32]]:
    """llama.cpp's factors for Llama 3's rope: the divisor of each frequency."""
    rope = config.get("rope_scaling") or {}
    if rope.get("rope_type") != "llama3":
        return {}
    inverse = 1 / config["rope_theta"] ** (np.arange(0, config["head_dim"], 2) / config["head_dim"])
    turns = rope["original_max_position_embeddings"] * inverse / (2 * np.pi)
    low, high, factor = (rope[name] for name in ("low_freq_factor", "high_freq_factor", "factor"))
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return {"rope_freqs.weight": (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)}


def _write_config(writer: gguf.GGUFWriter, config: dict[str, Any], architecture: str) -> None:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_freq_base(config.get("rope_theta", 10_000.0))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(int(head_dim * config.get("partial_rotary_factor", 1)))
    if experts := config.get("num_local_experts", config.get("num_experts")):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config.get("moe_intermediate_size", config["intermediate_size"]))


def _write_tokenizer(writer: gguf.GGUFWriter, path: Path, vocabulary: int) -> None:
    read = json.loads(path.read_bytes())
    texts = {id_: text for text, id_ in read["model"]["vocab"].items()}
    special = {token["id"]: token["content"] for token in read["added_tokens"]}
    texts |= special
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([texts.get(id_, f"[PAD{id_}]") for id_ in range(vocabulary)])
    types = {id_: gguf.TokenType.CONTROL if id_ in special else gguf.TokenType.NORMAL for id_ in texts}
    writer.add_token_types([types.get(id_, gguf.TokenType.UNUSED) for id_ in range(vocabulary)])
    merges = read["model"]["merges"]
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in merges])
    writer.add_eos_token_id(1)
    writer.add_chat_template("{% for message in messages %}{{ message.content }}{% endfor %}")


def write_tokens(
    path: Path, model: str, tokens: list[str], kinds: list[int], *, scores: list[float] | None = None, **more: Any
) -> None:
    """A file of a vocabulary alone; ``more`` are further keys below ``tokenizer.ggml``."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    if scores is not None:
        writer.add_token_scores(scores)
    for key, value in more.items():
        if isinstance(value, list):
            writer.add_array(f"tokenizer.ggml.{key}", value)
        else:
            writer.add_key_value(f"tokenizer.ggml.{key}", value, gguf.GGUFValueType.get_type(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def real_files() -> list[Path]:
    """The files that DRAFTWOOD_GGUF names: a folder, or files."""
    given = [Path(name) for name in os.environ.get("DRAFTWOOD_GGUF", "").split(os.pathsep) if name]
    return [file for path in given for file in (sorted(path.glob("*.gguf")) if path.is_dir() else [path])]
