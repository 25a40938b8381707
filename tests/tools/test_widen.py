"""Widened teachers and drafters compute what the small ones compute."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from draftwood.compiler.checkpoint import Checkpoint
from draftwood.compiler.medusa_checkpoint import MedusaCheckpoint
from draftwood.errors import RequestError
from draftwood.tools.widen import main, widen, widen_medusa

SIZES = {"hidden": 32, "intermediate": 48, "layers": 2, "heads": 4, "kv_heads": 2}
# Sums run in another order and gains are rounded once; logits are of order 1.
TOLERANCE = 1e-5

SHAPES = [
    pytest.param({"hidden": 128}, id="hidden by 4"),
    pytest.param({"hidden": 56}, id="hidden by 1.75"),
    pytest.param({"intermediate": 100}, id="intermediate"),
    pytest.param({"layers": 5}, id="layers"),
    pytest.param({"heads": 8}, id="larger groups"),
    pytest.param({"heads": 8, "kv_heads": 4}, id="more key heads"),
    pytest.param({"heads": 16, "kv_heads": 4, "hidden": 96, "intermediate": 64, "layers": 3}, id="all"),
]


def save_teacher(folder: Path, **fields: object) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, **fields,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        # Large enough for every part to matter; biases and gains start out as 0 and 1.
        scale = 0.3 if parameter.ndim == 1 else parameter.shape[1] ** -0.5
        parameter.data = torch.randn(parameter.shape) * scale + (1.0 if name.endswith("norm.weight") else 0.0)
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def outputs(model: LlamaForCausalLM) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.arange(40)[None] % 61
    hidden = model.model(ids).last_hidden_state
    return hidden, model.lm_head(hidden)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("fields", [{}, {"tie_word_embeddings": True, "attention_bias": True}], ids=["plain", "biased"])
def test_logits_are_kept(tmp_path: Path, shape: dict, fields: dict) -> None:
    small = save_teacher(tmp_path / "small", **fields)
    wide = widen(tmp_path / "small", tmp_path / "wide", **shape)
    model, report = LlamaForCausalLM.from_pretrained(tmp_path / "wide", output_loading_info=True)
    assert not any(report.values())
    assert Checkpoint.open(tmp_path / "wide").config == wide
    assert {name: getattr(wide, name) for name in SIZES} == SIZES | shape
    (hidden, logits), (wide_hidden, wide_logits) = outputs(small), outputs(model.eval())
    assert (logits - wide_logits).abs().max() <= TOLERANCE * logits.abs().max()
    assert (hidden - wide_hidden[..., :32]).abs().max() <= TOLERANCE * hidden.abs().max()
    assert not wide_hidden[..., 32:].any()


def test_gain_and_eps_both_matter(tmp_path: Path) -> None:
    small = save_teacher(tmp_path / "small", rms_norm_eps=0.1)
    widen(tmp_path / "small", tmp_path / "wide", hidden=96)
    config = tmp_path / "wide" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"rms_norm_eps": 0.1}))
    wrong = outputs(LlamaForCausalLM.from_pretrained(tmp_path / "wide"))[1]
    assert (outputs(small)[1] - wrong).abs().max() > 1e-2


def test_new_rows_are_not_zero(tmp_path: Path) -> None:
    save_teacher(tmp_path / "small")
    widen(tmp_path / "small", tmp_path / "wide", heads=8, intermediate=64, layers=3)
    tensors = load_file(tmp_path / "wide" / "model.safetensors")
    assert tensors["model.layers.0.self_attn.q_proj.weight"].any(1).all()
    assert tensors["model.layers.2.mlp.gate_proj.weight"].any(1).all()
    assert not tensors["model.layers.2.mlp.down_proj.weight"].any()


def test_equal_seeds_give_equal_files(tmp_path: Path) -> None:
    save_teacher(tmp_path / "small")
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        widen(tmp_path / "small", tmp_path / name, heads=8, seed=seed)
    a, b, c = (Checkpoint.open(tmp_path / name).digest() for name in "abc")
    assert a == b != c


def test_dtype_and_other_files(tmp_path: Path) -> None:
    save_teacher(tmp_path / "small")
    (tmp_path / "small" / "tokenizer.json").write_text("{}")
    widen(tmp_path / "small", tmp_path / "wide", hidden=64, dtype="bfloat16")
    assert Checkpoint.open(tmp_path / "wide").dtype == torch.bfloat16
    assert json.loads((tmp_path / "wide" / "config.json").read_text())["dtype"] == "bfloat16"
    assert (tmp_path / "wide" / "tokenizer.json").is_file()
    assert (tmp_path / "wide" / "generation_config.json").is_file()


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"hidden": 16}, "hidden is 16; expected at least the source's 32"),
        ({"heads": 6, "kv_heads": 4}, "heads is 6 for 4 kv_heads"),
        ({"kv_heads": 4}, "heads is 4 for 4 kv_heads; expected a multiple, at least 2"),
        ({"hidden": 36, "heads": 8}, "hidden is 36; expected a multiple of heads"),
    ],
)
def test_sizes_refused(tmp_path: Path, shape: dict, message: str) -> None:
    save_teacher(tmp_path / "small")
    with pytest.raises(RequestError, match=message):
        widen(tmp_path / "small", tmp_path / "wide", **shape)
    assert [path.name for path in tmp_path.iterdir()] == ["small"]


def test_target_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_teacher(tmp_path / "small")
    with pytest.raises(RequestError, match="exists; expected a folder that does not"):
        widen(tmp_path / "small", tmp_path / "small", hidden=64)

    def full_disk(*_: object, **__: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("draftwood.tools.widen.save_file", full_disk)
    with pytest.raises(OSError, match="no space left"):
        widen(tmp_path / "small", tmp_path / "wide", hidden=64)
    assert [path.name for path in tmp_path.iterdir()] == ["small"]


def save_heads(folder: Path, tied: bool, heads: int = 3, blocks: int = 2) -> None:
    tensors = {}
    for i in range(heads):
        for j in range(blocks):
            tensors |= {
                f"{i}.{j}.linear.weight": torch.randn(32, 32),
                f"{i}.{j}.linear.bias": torch.randn(32),
            }
        tensors |= {} if tied else {f"{i}.{blocks}.weight": torch.randn(61, 32)}
    folder.mkdir()
    save_file(tensors, folder / "medusa_lm_head.safetensors")


def head_outputs(heads: MedusaCheckpoint, hidden: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    logits = []
    for i in range(heads.heads):
        x = hidden
        for j in range(heads.blocks):
            at = f"heads.{i}.blocks.{j}"
            x = x + F.silu(F.linear(x, heads.weight(f"{at}.weight"), heads.weight(f"{at}.bias")))
        logits.append(F.linear(x, output if heads.tied else heads.weight(f"heads.{i}.out.weight")))
    return torch.stack(logits)


@pytest.mark.parametrize("tied", [False, True], ids=["own output", "tied"])
@pytest.mark.parametrize("hidden", [128, 56])
def test_medusa_logits_are_kept(tmp_path: Path, tied: bool, hidden: int) -> None:
    small = save_teacher(tmp_path / "small")
    save_heads(tmp_path / "heads", tied)
    before = Checkpoint.open(tmp_path / "small").config
    wide = widen(tmp_path / "small", tmp_path / "wide", hidden=hidden)
    widen_medusa(tmp_path / "heads", tmp_path / "wide_heads", before, hidden=hidden)
    model = LlamaForCausalLM.from_pretrained(tmp_path / "wide").eval()
    opened = MedusaCheckpoint.open(tmp_path / "heads", before)
    widened = MedusaCheckpoint.open(tmp_path / "wide_heads", wide)
    assert (widened.heads, widened.blocks, widened.tied) == (3, 2, tied)
    expected = head_outputs(opened, outputs(small)[0], small.lm_head.weight)
    got = head_outputs(widened, outputs(model)[0], model.lm_head.weight)
    assert (expected - got).abs().max() <= TOLERANCE * expected.abs().max()


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_teacher(tmp_path / "small")
    save_heads(tmp_path / "heads", tied=True)
    paths = [str(tmp_path / name) for name in ("small", "wide", "heads", "wide_heads")]
    flags = ["--hidden", "64", "--kv-heads", "2", "--dtype", "bfloat16", "--medusa", *paths[2:]]
    assert main([*paths[:2], *flags]) == 0
    wide = Checkpoint.open(tmp_path / "wide").config
    assert MedusaCheckpoint.open(tmp_path / "wide_heads", wide).dtype == torch.bfloat16
    assert "2 layers of 64, 4 heads over 2, bfloat16" in capsys.readouterr().out
    assert main([*paths[:2], *flags]) == 2
    assert "exists" in capsys.readouterr().err
