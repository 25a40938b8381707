"""Random models for the hour on a device: teachers of two layers, each with Medusa heads and an EAGLE-3 drafter.

    python -m draftwood.tools.doctor.npu_models NAME FOLDER

Nothing is downloaded. A teacher's output matrix is its embedding, so that text likes to repeat itself. Drafters mostly
propose the last token again, so that drafts hit. Layers add as much as they read: a wrong mask changes the result.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from draftwood.compiler.teachers.checkpoint import expected_tensors
from draftwood.compiler.teachers.registry import read_config
from draftwood.tools.demo import resolve

HEADS = 3
# The properties of a model, besides the shape that it is two layers of. The first has the widths that any test has. The
# others have those of 7B models: rows of 4096, heads of 128, four or eight query heads for one of keys, a vocabulary of
# 152k.
MODELS: dict[str, tuple[str, dict[str, int]]] = {
    "small": (
        "shape:llama-3.1-8b",
        {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
        | {"head_dim": 64, "vocab_size": 512},
    ),
    "wide": ("shape:qwen3-8b", {}),
    "wide-8": ("shape:llama-3.1-8b", {"num_key_value_heads": 4, "vocab_size": 151936}),
}
# Of the teacher's tokens, those that an EAGLE-3 drafter knows.
_DRAFTED = 32000


def make(name: str, folder: Path) -> None:
    """Writes the teacher into a folder, which it makes, and its drafters into ``medusa`` and ``eagle3`` in it."""
    shape, changed = MODELS[name]
    fields = json.loads((resolve(shape) / "config.json").read_text()) | changed
    fields |= {"num_hidden_layers": 2, "tie_word_embeddings": True, "max_position_embeddings": 4096}
    fields |= {"rope_scaling": None, "bos_token_id": 0, "eos_token_id": 1}
    random = torch.Generator().manual_seed(0)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(fields))
    config = read_config(folder)
    tensors = {tensor: _values(tensor, shape, random) for tensor, shape in expected_tensors(config).items()}
    save_file(tensors, folder / "model.safetensors")
    _tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    _medusa(folder / "medusa", config.hidden, random)
    sizes = {"head_dim": config.head_dim} | fields
    _eagle3(folder / "eagle3", sizes, tensors["model.embed_tokens.weight"], random)


def _values(name: str, shape: tuple[int, ...], random: torch.Generator) -> Tensor:
    """Norms are 1, and a matrix gives rows as large as those that it reads."""
    if "norm" in name:
        return torch.ones(shape, dtype=torch.bfloat16)
    return torch.empty(shape, dtype=torch.bfloat16).normal_(0, 1 / math.sqrt(shape[-1]), generator=random)


def _tokenizer() -> Tokenizer:
    """Bytes, a token each."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={sign: 2 + i for i, sign in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<begin>", "<end>"])
    return tokenizer


def _medusa(folder: Path, hidden: int, random: torch.Generator) -> None:
    folder.mkdir()
    heads = {f"{i}.0.linear.weight": _values("", (hidden, hidden), random) for i in range(HEADS)}
    heads |= {f"{i}.0.linear.bias": torch.zeros(hidden, dtype=torch.bfloat16) for i in range(HEADS)}
    save_file(heads, folder / "medusa_lm_head.safetensors")


def _eagle3(folder: Path, fields: Mapping[str, Any], embedding: Tensor, random: torch.Generator) -> None:
    """One block of Llama's over three states; the first, the embedding's row, goes on."""
    hidden, inner, dim = fields["hidden_size"], fields["intermediate_size"], fields["head_dim"]
    rows, cached = fields["num_attention_heads"] * dim, fields["num_key_value_heads"] * dim
    drafted = min(_DRAFTED, fields["vocab_size"] - fields["vocab_size"] // 4)
    shapes = {"self_attn.q_proj": (rows, 2 * hidden), "self_attn.k_proj": (cached, 2 * hidden)}
    shapes |= {"self_attn.v_proj": (cached, 2 * hidden), "self_attn.o_proj": (hidden, rows)}
    shapes |= {"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)}
    tensors = {f"midlayer.{name}.weight": _values(name, shape, random) for name, shape in shapes.items()}
    for name in ("midlayer.self_attn.q_proj.weight", "midlayer.self_attn.k_proj.weight"):
        tensors[name] *= 2  # rows look at few others, so that a wrong token is seen among a hundred
    for name in ("midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm", "norm"):
        tensors[f"{name}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    rest = 0.2 * _values("", (hidden, 2 * hidden), random)
    tensors["fc.weight"] = torch.cat((torch.eye(hidden, dtype=torch.bfloat16), rest), 1)
    tensors["lm_head.weight"] = embedding[:drafted].clone()
    tensors["d2t"] = torch.zeros(drafted, dtype=torch.int64)
    drafter_fields = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1}
    drafter_fields |= {"draft_vocab_size": drafted, "target_hidden_size": hidden, "aux_layer_ids": [0, 1, 2]}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**fields, **drafter_fields, "tie_word_embeddings": False}))
    save_file(tensors, folder / "model.safetensors")


if __name__ == "__main__":
    make(sys.argv[1], Path(sys.argv[2]))
