"""Factories of random teachers and drafters of any size, for the tests and for the fuzz stage.

``sizes`` is a config.json's content. A drafter has the sizes of its teacher and, where it says so, its habit of
proposing the last token again, which a teacher of these often writes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Generator, Tensor, eye, ones, randn, zeros

from draftwood.compiler.teachers.checkpoint import expected_tensors
from draftwood.compiler.teachers.registry import read_config
from draftwood.tests.bpe import save_tokenizer, train_tokenizer
from draftwood.tools.training.rows import Row

Sizes = Mapping[str, Any]
ROWS: list[Row] = [{"id": "0", "text": "the cat sat on the mat and the hat"}] * 9
SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
         "rms_norm_eps", "rope_theta")  # fmt: skip


def save_teacher(folder: Path, sizes: Sizes, spread: float = 0.12) -> Path:
    """A random teacher whose output matrix nearly is its embedding, so that its text repeats and drafts hit."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(sizes))
    random = Generator().manual_seed(0)
    tensors = {
        name: ones(shape) if "norm" in name else randn(shape, generator=random) * spread
        for name, shape in expected_tensors(read_config(folder)).items()
    }
    noise = randn(tensors["lm_head.weight"].shape, generator=random) * 0.05
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + noise
    save_file(tensors, folder / "model.safetensors")
    save_tokenizer(train_tokenizer(ROWS, sizes["vocab_size"]), folder)
    return folder


def block(
    sizes: Sizes,
    random: Generator,
    at: str,
    width: int = 0,
    scale: float = 0.05,
    heads: bool = False,
    norms: float = 0.0,
) -> dict[str, Tensor]:
    """A decoder block below the name ``at``. Its q, k and v read ``width`` features; ``heads`` gives them norms.
    Matrices spread by ``scale`` around zero, the norms' weights by ``norms`` around one."""
    hidden, inner, head = sizes["hidden_size"], sizes["intermediate_size"], sizes["head_dim"]
    rows = {"q": sizes["num_attention_heads"] * head} | dict.fromkeys("kv", sizes["num_key_value_heads"] * head)
    made = {f"self_attn.{s}_proj": randn(n, width or hidden, generator=random) for s, n in rows.items()}
    made |= {f"mlp.{side}_proj": randn(inner, hidden, generator=random) for side in ("gate", "up")}
    made["self_attn.o_proj"] = randn(hidden, rows["q"], generator=random)
    made["mlp.down_proj"] = randn(hidden, inner, generator=random)
    widths = dict.fromkeys(("input_layernorm", "post_attention_layernorm"), hidden)
    widths |= dict.fromkeys(("self_attn.q_norm", "self_attn.k_norm"), head) if heads else {}
    tensors = {name: value * scale for name, value in made.items()}
    for name, size in widths.items():
        tensors[name] = 1 + randn(size, generator=random) * norms if norms else ones(size)
    return {f"{at}.{name}.weight": value for name, value in tensors.items()}


def save_drafter(folder: Path, sizes: Sizes, fields: Sizes, tensors: dict[str, Tensor], ids: Tensor) -> Path:
    """A drafter that proposes the teacher's tokens ``ids``, reads three of its states and has its output matrix."""
    folder.mkdir(parents=True, exist_ok=True)
    hidden = sizes["hidden_size"]
    config = {name: sizes[name] for name in SIZES}
    config |= {"draft_vocab_size": len(ids), "target_hidden_size": hidden, "aux_layer_ids": [0, 1, 2]}
    (folder / "config.json").write_text(json.dumps(config | dict(fields)))
    ends = {"d2t": ids - torch.arange(len(ids)), "norm.weight": ones(hidden)}
    save_file(tensors | ends, folder / "model.safetensors")
    return folder


def save_medusa(folder: Path, sizes: Sizes) -> Path:
    """Two heads, tied to the teacher's output matrix."""
    folder.mkdir(parents=True, exist_ok=True)
    hidden, random = sizes["hidden_size"], Generator().manual_seed(1)
    heads = {f"{i}.0.linear.weight": randn(hidden, hidden, generator=random) * 0.05 for i in range(2)}
    heads |= {f"{i}.0.linear.bias": zeros(hidden) for i in range(2)}
    save_file(heads, folder / "medusa_lm_head.safetensors")
    return folder


def save_eagle3(folder: Path, sizes: Sizes) -> Path:
    """An EAGLE-3 drafter that mostly proposes the last token again, of most of the teacher's tokens."""
    hidden, random = sizes["hidden_size"], Generator().manual_seed(2)
    tensors = block(sizes, random, "midlayer", 2 * hidden)
    tensors["midlayer.hidden_norm.weight"] = ones(hidden)
    tensors["fc.weight"] = torch.cat((eye(hidden), randn(hidden, 2 * hidden, generator=random) * 0.02), 1)
    ids = torch.arange(sizes["vocab_size"])
    fields = {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1}
    return save_drafter(folder, sizes, fields, tensors, ids[ids % 7 != 6])


def save_fasteagle(folder: Path, sizes: Sizes, levels: int = 3) -> Path:
    """A FastEagle cascade of the same habit."""
    hidden, random = sizes["hidden_size"], Generator().manual_seed(3)
    tensors: dict[str, Tensor] = {}
    for level in range(levels):
        tensors |= block(sizes, random, f"layers.{level}")
    tensors["fc.weight"] = randn(hidden, 3 * hidden, generator=random) * 0.1
    tensors["proj.weight"] = torch.cat((eye(hidden) * 0.05, eye(hidden)), 1)
    fields = {"architectures": ["FastEagleDrafter"], "model_type": "fasteagle", "num_hidden_layers": levels}
    return save_drafter(folder, sizes, fields, tensors, torch.arange(20, sizes["vocab_size"]))


def save_peagle(folder: Path, sizes: Sizes) -> None:
    """Two layers, Qwen3's; the root's row often proposes the token before it again."""
    hidden, random = sizes["hidden_size"], Generator().manual_seed(2)
    tensors = block(sizes, random, "layers.0", 2 * hidden, heads=True) | block(sizes, random, "layers.1", heads=True)
    tensors |= {"layers.0.hidden_norm.weight": ones(hidden), "norm.weight": ones(hidden)}
    tensors["fc.weight"] = torch.cat((eye(hidden), randn(hidden, 2 * hidden, generator=random) * 0.02), 1)
    tensors["mask_hidden"] = randn(1, 1, 3 * hidden, generator=random)
    own = {"speculators_model_type": "peagle", "architectures": ["PEagleSpeculator"]}
    nested = {name: sizes[name] for name in SIZES} | {"num_hidden_layers": 2, "model_type": "qwen3"}
    own |= {"num_depths": 3, "aux_layer_ids": [0, 1, 2], "transformer_layer_config": nested}
    _save(folder, own | {"draft_vocab_size": sizes["vocab_size"], "mask_token_id": mask(sizes)}, tensors)


def save_dflash(folder: Path, sizes: Sizes) -> None:
    """Two layers over three states; the root's row often proposes the root again."""
    hidden, random = sizes["hidden_size"], Generator().manual_seed(3)
    tensors = block(sizes, random, "layers.0", scale=0.1, heads=True)
    tensors |= block(sizes, random, "layers.1", scale=0.1, heads=True)
    tensors |= {"hidden_norm.weight": ones(hidden), "norm.weight": ones(hidden)}
    tensors["fc.weight"] = randn(hidden, 3 * hidden, generator=random) * 0.1
    own = {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "num_hidden_layers": 2, "block_size": 3}
    nested = {"dflash_config": {"mask_token_id": mask(sizes), "shift_label": True}, "aux_layer_ids": [0, 1, 2]}
    _save(folder, {name: sizes[name] for name in SIZES} | own | nested, tensors)


def save_dspark(folder: Path, sizes: Sizes) -> None:
    """DFlash's drafter above with a recurrent head and a confidence head, in DeepSpec's layout."""
    save_dflash(folder, sizes)
    hidden, vocabulary = sizes["hidden_size"], sizes["vocab_size"]
    random, tensors = Generator().manual_seed(5), load_file(folder / "model.safetensors")
    shapes = {"markov_w1.weight": (vocabulary, 16), "markov_w2.weight": (vocabulary, 16)}
    shapes |= {"joint_proj.weight": (48, hidden + 32), "joint_proj.bias": (48,)}
    shapes = {f"markov_head.{name}": shape for name, shape in shapes.items()}
    shapes |= {"confidence_head.proj.weight": (1, hidden + 16), "confidence_head.proj.bias": (1,)}
    tensors |= {name: randn(shape, generator=random) * 0.05 for name, shape in shapes.items()}
    own = {"architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", "num_hidden_layers": 2, "block_size": 3}
    heads = {"markov_rank": 16, "markov_head_type": "rnn", "enable_confidence_head": True}
    nested = {"mask_token_id": mask(sizes), "aux_layer_ids": [0, 1, 2], "confidence_head_with_markov": True}
    _save(folder, {name: sizes[name] for name in SIZES} | own | heads | nested, tensors)


def mask(sizes: Sizes) -> int:
    """The mask token of drafters that have one: the teacher's last."""
    return int(sizes["vocab_size"]) - 1


def _save(folder: Path, config: Sizes, tensors: dict[str, Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
