"""Medusa heads as others than their authors publish them, against the formula and against the authors' layout."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from draftwood.compiler.drafters.kind import MEDUSA
from draftwood.compiler.drafters.medusa.checkpoint import MedusaCheckpoint
from draftwood.compiler.drafters.medusa.model import MedusaModel
from draftwood.compiler.drafters.medusa.network import MedusaConfig
from draftwood.compiler.drafters.registry import describe_drafter, kind_of, open_drafter
from draftwood.compiler.teachers.checkpoint import Checkpoint
from draftwood.errors import CheckpointError

V, H = 101, 64
# fp32 against float64 through a few blocks and one softmax.
CLOSE = 1e-4
STATE = torch.randn(1, H, generator=torch.Generator().manual_seed(2))
VLLM = {"model_type": "medusa", "architectures": ["MedusaModel"], "hidden_size": H, "vocab_size": V}
IDS = torch.randperm(V, generator=torch.Generator().manual_seed(4))[:30]


def vllm_tensors(heads: int, blocks: int, rows: int = V, *, bias: bool = False, shared: bool = False) -> dict:
    random = torch.Generator().manual_seed(3)
    tensors = {}
    for i in range(heads):
        for j in range(blocks):
            tensors[f"blocks.{i}.layers.{j}.weight"] = torch.randn(H, H, generator=random) * 0.15
            if bias:
                tensors[f"blocks.{i}.layers.{j}.bias"] = torch.randn(H, generator=random)
        if not shared:
            tensors[f"lm_heads.{i}.weight"] = torch.randn(rows, H, generator=random)
    return tensors | ({"lm_head.weight": torch.randn(rows, H, generator=random)} if shared else {})


def expected(tensors: dict, head: int, blocks: int, ids: torch.Tensor) -> tuple[list[int], np.ndarray]:
    """The seven best ids of a head and their log-probabilities, in float64 and by vLLM's names."""
    x = STATE[0].double()
    for j in range(blocks):
        at = f"blocks.{head}.layers.{j}"
        inner = tensors[f"{at}.weight"].double() @ x + tensors.get(f"{at}.bias", torch.zeros(H)).double()
        x = x + inner * torch.sigmoid(inner)
    output = tensors.get("lm_head.weight", tensors.get(f"lm_heads.{head}.weight")).double()
    logits = (output[ids] if len(output) != len(ids) else output) @ x
    best = logits.argsort(descending=True)[:7]
    return ids[best].tolist(), (logits - logits.logsumexp(0))[best].numpy()


CASES = {
    "plain": {"heads": 3, "blocks": 1},
    "deep": {"heads": 2, "blocks": 3, "bias": True, "fields": {"medusa_fc_bias": True}},
    "shared": {"heads": 2, "blocks": 1, "shared": True, "fields": {"original_lm_head": True}},
    "cut": {"heads": 2, "blocks": 1, "rows": 30, "ids": IDS, "fields": {"truncated_vocab_size": 30}},
    "to be cut": {"heads": 2, "blocks": 1, "ids": IDS.int(), "fields": {"truncated_vocab_size": 30}},
    "prefixed": {"heads": 2, "blocks": 2, "before": "medusa_heads."},
}


@pytest.mark.parametrize("name", CASES)
def test_vllm(make: Any, teacher: Checkpoint, tmp_path: Path, name: str) -> None:
    case = dict(CASES[name])
    own, ids, before = case.pop("fields", {}), case.pop("ids", None), case.pop("before", "")
    tensors = vllm_tensors(**case)
    held = tensors | ({} if ids is None else {"token_map": ids})
    make.save(tmp_path, VLLM | {"num_heads": 9} | own, {before + key: t for key, t in held.items()})
    assert kind_of(tmp_path) is MEDUSA
    opened = MEDUSA.model.open(tmp_path, teacher)
    module = opened.model.module(teacher.config, 16).requires_grad_(False)
    checkpoint = opened.checkpoint
    weights = {name: checkpoint.weight(name) for name in checkpoint.names()}
    module.load_state_dict(weights | checkpoint.buffers(8))
    tokens, scores = module(STATE, torch.zeros(1, 1), None, 7)
    for head in range(case["heads"]):
        wanted = expected(tensors, head, case["blocks"], torch.arange(V) if ids is None else ids.long())
        assert tokens[head].tolist() == wanted[0]
        np.testing.assert_allclose(scores[head], wanted[1], rtol=0, atol=CLOSE)


@pytest.fixture
def whole(teacher: Checkpoint, tmp_path: Path, save_medusa: Callable) -> tuple[Path, Path]:
    """Equal heads in their own file and among the teacher's tensors."""
    alone, folder = tmp_path / "alone", tmp_path / "whole"
    alone.mkdir(), folder.mkdir()
    tensors = save_medusa(alone, 2, 2)
    heads = {f"medusa_head.{key}": tensor for key, tensor in tensors.items()}
    save_file(load_file(teacher.path / "model.safetensors") | heads, folder / "model.safetensors")
    config = json.loads((teacher.path / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"medusa_num_heads": 5, "medusa_num_layers": 1}))
    return alone, folder


def test_heads_within_a_whole_teacher(teacher: Checkpoint, whole: tuple[Path, Path]) -> None:
    alone, folder = (MEDUSA.model.open(path, teacher) for path in whole)
    assert kind_of(whole[1]) is MEDUSA and folder.model == alone.model and folder.model.config.blocks == 2
    assert folder.checkpoint.names() == alone.checkpoint.names()
    for name in alone.checkpoint.names():
        assert torch.equal(folder.checkpoint.weight(name), alone.checkpoint.weight(name))
    assert Checkpoint.open(whole[1]).names() == teacher.names()  # the folder serves as the teacher too


def test_heads_of_another_teacher_are_refused(whole: tuple[Path, Path], teacher: Checkpoint) -> None:
    file = whole[1] / "model.safetensors"
    save_file(load_file(file) | {"model.norm.weight": torch.full((H,), 3.0)}, file)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is not that of .*; give this folder as MODEL"):
        MEDUSA.model.open(whole[1], teacher)


REFUSED = [
    ({}, {"x": torch.ones(1)}, "unexpected key x"),
    ({"truncated_vocab_size": 30}, {}, "truncated_vocab_size is 30; expected null, or a token_map"),
    ({"original_lm_head": True}, {}, "original_lm_head is True; expected false, since the file has no lm_head"),
    ({"logit_scale": 2.0}, {}, "logit_scale is 2.0; expected 1 or no such field"),
    (
        {"original_lm_head": True},
        {"lm_head.weight": torch.ones(V, H)},
        "holds lm_head.weight for all heads and lm_heads.0.weight; expected one of the two",
    ),
    ({}, {"token_map": torch.tensor([1, 1])}, "token_map has ids from 1 to 1, 1 of 2 different"),
    ({}, {"token_map": torch.tensor([1, 101])}, "expected each id once, from 0 to 100"),
    ({}, {"token_map": torch.ones(2)}, r"token_map is F32 \[2\]; expected I64 ids"),
    ({}, {"lm_heads.1.weight": torch.ones(99, H)}, r"lm_heads.1.weight has shape \[99, 64\]; expected \[101, 64\]"),
    (
        {},
        {"blocks.1.layers.0.bias": torch.ones(H)},
        r"1\.0 holds linear.bias and linear.weight; expected",
    ),
]


@pytest.mark.parametrize(("own", "extra", "message"), REFUSED, ids=[message[:30] for *_, message in REFUSED])
def test_refused(make: Any, teacher: Checkpoint, tmp_path: Path, own: dict, extra: dict, message: str) -> None:
    make.save(tmp_path, VLLM | own, vllm_tensors(2, 1) | extra)
    with pytest.raises(CheckpointError, match=message) as caught:
        MedusaCheckpoint.open(tmp_path, teacher.config)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_promise_without_heads(make: Any, teacher: Checkpoint, tmp_path: Path) -> None:
    make.save(tmp_path, {"medusa_num_heads": 3}, {"model.norm.weight": torch.ones(H)})
    with pytest.raises(CheckpointError, match=r"holds no tensors medusa_head\.\*, which medusa_num_heads promises"):
        MEDUSA.model.open(tmp_path, teacher)


def test_heads_that_are_there_describe_themselves(tmp_path: Path, teacher: Checkpoint) -> None:
    """A build without weights counts the heads of the file, as ``bind`` does later; config.json may say less."""
    heads = {f"{i}.0.linear.weight": torch.zeros(H, H) for i in range(2)}
    save_file(heads, tmp_path / "medusa_lm_head.safetensors")
    (tmp_path / "config.json").write_text('{"medusa_num_heads": 5, "medusa_num_layers": 1}')
    assert describe_drafter(tmp_path, teacher).model == MedusaModel(MedusaConfig(2, 1, tied=True, bias=False))
    (tmp_path / "medusa_lm_head.safetensors").unlink()
    assert describe_drafter(tmp_path, teacher).model == MedusaModel(MedusaConfig(5, 1, tied=False))


@pytest.mark.parametrize("named", ["", "medusa_lm_head.safetensors"])
def test_heads_without_config_are_described(tmp_path: Path, teacher: Checkpoint, named: str) -> None:
    """A folder with the file alone, or the file: as every command takes it."""
    save_file({f"{i}.0.linear.weight": torch.zeros(H, H) for i in range(2)}, tmp_path / "medusa_lm_head.safetensors")
    assert describe_drafter(tmp_path / named, teacher).model == open_drafter(tmp_path / named, teacher).model
