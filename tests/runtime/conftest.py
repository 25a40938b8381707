"""A tiny bundle, built once: 2 layers of 64, 128 tokens, two Medusa heads, trees of several shapes."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from draftwood.compiler.bundle import BuildRequest, build
from draftwood.compiler.checkpoint import expected_tensors
from draftwood.compiler.config import read_config
from draftwood.runtime.bundle import Bundle
from draftwood.trees import Topology

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "float32",
}
RAGGED = [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0)]


def write_teacher(folder: Path, seed: int = 0) -> Path:
    """A random teacher whose output matrix nearly is its embedding, so that its text repeats and drafts hit."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    random = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.ones(shape) if "norm" in name else torch.randn(shape, generator=random) * 0.12
        for name, shape in expected_tensors(read_config(folder)).items()
    }
    noise = torch.randn(tensors["lm_head.weight"].shape, generator=random) * 0.12
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + noise
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_heads(folder: Path) -> Path:
    folder.mkdir()
    random = torch.Generator().manual_seed(1)
    blocks = {f"{i}.0.linear.weight": torch.randn(64, 64, generator=random) * 0.05 for i in range(2)}
    save_file(
        blocks | {f"{i}.0.linear.bias": torch.zeros(64) for i in range(2)},
        folder / "medusa_lm_head.safetensors",
    )
    return folder


@pytest.fixture(scope="session")
def bundle_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Read only: tests that alter a bundle copy it."""
    root = tmp_path_factory.mktemp("tiny")
    trees = (
        ("plain", Topology.plain()),
        ("chain-2", Topology.chain(2)),
        ("ragged", Topology.from_paths(RAGGED)),
    )
    request = BuildRequest(
        model=write_teacher(root / "teacher"),
        drafter=write_heads(root / "heads"),
        trees=trees,
        slots=(128, 256),
    )
    build(request, root / "bundle")
    return root / "bundle"


@pytest.fixture(scope="session")
def bundle(bundle_folder: Path) -> Bundle:
    return Bundle.open(bundle_folder)


@pytest.fixture
def prompt() -> list[int]:
    return np.random.default_rng(5).integers(2, 128, 40).tolist()
