"""Medusa heads against the formula, one head and one block at a time."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from draftwood.compiler.drafters.medusa.checkpoint import MedusaCheckpoint
from draftwood.compiler.drafters.medusa.model import MedusaModel
from draftwood.compiler.drafters.medusa.network import MedusaHeads
from draftwood.compiler.teachers.config import TeacherConfig

TEACHER = TeacherConfig(
    family="llama", layers=1, hidden=64, intermediate=16, heads=4, kv_heads=2, head_dim=16, vocabulary=101,
    rms_norm_eps=1e-5, rope_theta=1e4, rope_scaling=None, max_positions=32, qkv_bias=False, o_bias=False,
    tied=False, dtype="float32", bos=1, eos=(2,),
)  # fmt: skip
# fp32 against float64: sums of 64 terms of order 1; measured 1e-6.
SCORES = 1e-5
HIDDEN = torch.randn(1, 64, generator=torch.Generator().manual_seed(2))
OUTPUT = torch.randn(101, 64, generator=torch.Generator().manual_seed(3)) * 0.15
NOISE = torch.randn(3, 101, generator=torch.Generator().manual_seed(4))


def log_probabilities(tensors: dict, head: int, blocks: int, tied: bool) -> np.ndarray:
    """float64 [V] of one head, by the published names."""
    x = HIDDEN[0].double().numpy()
    for j in range(blocks):
        weight, bias = (tensors[f"{head}.{j}.linear.{kind}"].double().numpy() for kind in ("weight", "bias"))
        inner = weight @ x + bias
        x = x + inner / (1 + np.exp(-inner))
    logits = (OUTPUT if tied else tensors[f"{head}.{blocks}.weight"]).double().numpy() @ x
    return logits - np.log(np.exp(logits).sum())


def load(folder: Path) -> MedusaHeads:
    checkpoint = MedusaCheckpoint.open(folder, TEACHER)
    module = MedusaModel(checkpoint.config).module(TEACHER, 16)
    module.load_state_dict({name: checkpoint.weight(name) for name in checkpoint.names()})
    return module.requires_grad_(False)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(("heads", "blocks"), [(3, 1), (2, 2)])
def test_candidates(tmp_path: Path, save_medusa: Callable, heads: int, blocks: int, tied: bool) -> None:
    tensors = save_medusa(tmp_path, heads, blocks, tied)
    ends = SimpleNamespace(scores=lambda hidden_RH: hidden_RH @ OUTPUT.T) if tied else None
    tokens, scores = load(tmp_path)(HIDDEN, NOISE[:heads], ends, 7)
    assert tokens.shape == scores.shape == (heads, 7) and tokens.dtype == torch.int64
    for head in range(heads):
        wanted = log_probabilities(tensors, head, blocks, tied) + NOISE[head].double().numpy()
        wanted -= np.log(np.exp(wanted).sum())
        assert tokens[head].tolist() == np.argsort(-wanted)[:7].tolist()
        np.testing.assert_allclose(scores[head], np.sort(wanted)[::-1][:7], rtol=0, atol=SCORES)


def test_heads_without_blocks_are_output_matrices(tmp_path: Path, save_medusa: Callable) -> None:
    tensors = save_medusa(tmp_path, 2, 0)
    tokens, _ = load(tmp_path)(HIDDEN, 0 * NOISE[:2], None, 1)
    assert tokens[:, 0].tolist() == [int((tensors[f"{i}.0.weight"] @ HIDDEN[0]).argmax()) for i in range(2)]


def test_state_names_are_those_of_the_checkpoint(tmp_path: Path, save_medusa: Callable) -> None:
    save_medusa(tmp_path, 2, 2)
    names = MedusaCheckpoint.open(tmp_path, TEACHER).names()
    assert list(MedusaHeads(64, 101, 2, 2, tied=False).state_dict()) == names
