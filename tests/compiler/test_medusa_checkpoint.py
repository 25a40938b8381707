"""Medusa heads: both containers, tied heads, and a linter that names the field that does not fit."""

import json
import os
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from draftwood.compiler.drafters.medusa.checkpoint import MedusaCheckpoint
from draftwood.compiler.drafters.medusa.network import MedusaConfig
from draftwood.compiler.teachers.config import TeacherConfig
from draftwood.errors import CheckpointError

HIDDEN, VOCABULARY = 8, 13
TEACHER = TeacherConfig(
    family="llama", layers=1, hidden=HIDDEN, intermediate=16, heads=2, kv_heads=1, head_dim=4,
    vocabulary=VOCABULARY, rms_norm_eps=1e-5, rope_theta=1e4, rope_scaling=None, max_positions=32,
    qkv_bias=False, o_bias=False, tied=False, dtype="float32", bos=1, eos=(2,),
)  # fmt: skip


def make_heads(heads: int = 2, blocks: int = 1, tied: bool = False, dtype: torch.dtype = torch.float32) -> dict:
    torch.manual_seed(0)
    tensors = {}
    for i in range(heads):
        for j in range(blocks):
            tensors[f"{i}.{j}.linear.weight"] = torch.randn(HIDDEN, HIDDEN).to(dtype)
            tensors[f"{i}.{j}.linear.bias"] = torch.randn(HIDDEN).to(dtype)
        if not tied:
            tensors[f"{i}.{blocks}.weight"] = torch.randn(VOCABULARY, HIDDEN).to(dtype)
    return tensors


def save(folder: Path, tensors: dict, kind: str = "safetensors") -> Path:
    file = folder / f"medusa_lm_head.{kind}"
    if kind == "pt":
        torch.save(tensors, file)
    else:
        save_file(tensors, file)
    return file


@pytest.mark.parametrize("kind", ["safetensors", "pt"])
@pytest.mark.parametrize(("heads", "blocks", "tied"), [(2, 1, False), (5, 3, False), (3, 2, True), (1, 0, False)])
@pytest.mark.parametrize("prefix", ["", "medusa_head."])
def test_opened(tmp_path: Path, kind: str, heads: int, blocks: int, tied: bool, prefix: str) -> None:
    tensors = make_heads(heads, blocks, tied)
    file = save(tmp_path, {prefix + key: tensor for key, tensor in tensors.items()}, kind)
    # Published configs state two heads while five are stored.
    (tmp_path / "config.json").write_text(json.dumps({"medusa_num_heads": 9, "medusa_num_layers": 9}))
    for path in (tmp_path, file):
        opened = MedusaCheckpoint.open(path, TEACHER)
        assert opened.config == MedusaConfig(heads, blocks, tied)
        assert opened.dtype == torch.float32 and len(opened.names()) == len(tensors)
    for name in opened.names():
        key = re.sub(r"heads\.(\d+)\.blocks\.(\d+)\.", r"\1.\2.linear.", name)
        key = re.sub(r"heads\.(\d+)\.out", rf"\1.{blocks}", key)
        assert torch.equal(opened.weight(name), tensors[key])


def test_blocks_are_read_each_on_its_own(tmp_path: Path) -> None:
    save(tmp_path, make_heads(blocks=2))
    opened = MedusaCheckpoint.open(tmp_path, TEACHER)
    assert not torch.equal(opened.weight("heads.0.blocks.0.weight"), opened.weight("heads.0.blocks.1.weight"))


def test_shared_blocks_of_the_original(tmp_path: Path) -> None:
    tensors = make_heads(1, 2)
    tensors["0.1.linear.weight"] = tensors["0.0.linear.weight"]  # one storage, two names, as torch saves it
    save(tmp_path, tensors, "pt")
    opened = MedusaCheckpoint.open(tmp_path, TEACHER)
    assert torch.equal(opened.weight("heads.0.blocks.0.weight"), opened.weight("heads.0.blocks.1.weight"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["safetensors", "pt"])
def test_dtype(tmp_path: Path, dtype: torch.dtype, kind: str) -> None:
    save(tmp_path, make_heads(dtype=dtype), kind)
    assert MedusaCheckpoint.open(tmp_path, TEACHER).dtype == dtype


def without(*keys: str) -> dict:
    return {key: tensor for key, tensor in make_heads(3).items() if not key.startswith(keys)}


REFUSED = [
    pytest.param(without("1."), "head 1 is missing; expected heads 0 to 2", id="gap"),
    pytest.param(without("0."), "head 0 is missing", id="no first head"),
    pytest.param(without("2.0.linear.bias"), r"2\.0 holds linear.weight; expected linear.bias and", id="no bias"),
    pytest.param(without("2.1"), r"2\.1 holds nothing; expected weight", id="one tied head"),
    pytest.param(without("0.1"), r"1\.1 holds weight; expected nothing", id="only the first tied"),
    pytest.param(
        without("1.") | {k: v for k, v in make_heads(2, 2).items() if k.startswith("1.")},
        r"1\.1 holds linear.bias and linear.weight; expected weight, .* 1 blocks",
        id="other block count",
    ),
    pytest.param(
        make_heads() | {"1.0.linear.weight": torch.ones(HIDDEN, 4)},
        r"1\.0\.linear\.weight has shape \[8, 4\]; expected \[8, 8\] .*hidden size 8",
        id="hidden",
    ),
    pytest.param(
        make_heads() | {"0.1.weight": torch.ones(99, HIDDEN)},
        r"0\.1\.weight has shape \[99, 8\]; expected \[13, 8\] .*vocabulary 13",
        id="vocabulary",
    ),
    pytest.param(
        make_heads() | {"lm_head.weight": torch.ones(1)},
        r"unexpected key lm_head\.weight",
        id="unexpected key",
    ),
    pytest.param(make_heads() | {"00.0.linear.weight": torch.ones(1)}, "unexpected key 00", id="leading zero"),
    pytest.param(make_heads() | {"medusa_head.0.1.weight": torch.ones(1)}, "with and without 'medusa_head", id="both"),
    pytest.param(
        make_heads() | {"0.1.weight": torch.ones(VOCABULARY, HIDDEN, dtype=torch.int8)},
        r"0\.1\.weight has dtype (I8|torch.int8); expected one of F32",
        id="integers",
    ),
    pytest.param(
        make_heads() | {"0.1.weight": torch.ones(VOCABULARY, HIDDEN).half()},
        r"has dtype F(16|32); expected F(32|16) like",
        id="mixed dtypes",
    ),
    pytest.param({}, "holds no tensors", id="empty"),
]


@pytest.mark.parametrize("kind", ["safetensors", "pt"])
@pytest.mark.parametrize(("tensors", "message"), REFUSED)
def test_refused(tmp_path: Path, tensors: dict, message: str, kind: str) -> None:
    file = save(tmp_path, tensors, kind)
    with pytest.raises(CheckpointError, match=message) as caught:
        MedusaCheckpoint.open(tmp_path, TEACHER)
    assert str(file) in str(caught.value) and "\n" not in str(caught.value)


class Payload:
    """Runs a command when an unrestricted pickle reader meets it."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.mark),)


def test_pickle_that_would_run_code_is_refused(tmp_path: Path) -> None:
    save(tmp_path, make_heads() | {"0.1.weight": Payload(tmp_path / "ran")}, "pt")
    with pytest.raises(CheckpointError, match="could run code"):
        MedusaCheckpoint.open(tmp_path, TEACHER)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("state", [[torch.ones(1)], {"0.0.linear.weight": 3}], ids=["list", "number"])
def test_pickle_of_something_else_is_refused(tmp_path: Path, state: object) -> None:
    torch.save(state, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(CheckpointError, match="no plain dict of tensors"):
        MedusaCheckpoint.open(tmp_path, TEACHER)


@pytest.mark.parametrize("kind", ["safetensors", "pt"])
@pytest.mark.parametrize("kept", [0, 4, 300])
def test_truncated_file_refused(tmp_path: Path, kind: str, kept: int) -> None:
    file = save(tmp_path, make_heads(), kind)
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match="not a whole"):
        MedusaCheckpoint.open(tmp_path, TEACHER)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no Medusa heads; expected medusa_lm_head\.safetensors or"):
        MedusaCheckpoint.open(tmp_path, TEACHER)


def test_digest(tmp_path: Path) -> None:
    save(tmp_path, make_heads())
    before = MedusaCheckpoint.open(tmp_path, TEACHER).digest()
    save(tmp_path, make_heads() | {"0.0.linear.bias": torch.zeros(HIDDEN)})
    assert len({before, MedusaCheckpoint.open(tmp_path, TEACHER).digest()}) == 2
