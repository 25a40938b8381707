"""The package compressed-tensors reads our files, and we read its files."""

import json
from pathlib import Path

import compressed_tensors as ct
import pytest
import torch
from safetensors.torch import load_file

from draftwood.compiler.quantisation.teacher import Request, quantise
from draftwood.compiler.teachers.checkpoint import Checkpoint
from draftwood.tests.packed_checkpoints import both

# Rows of the tiny teacher rounded to int8 move its logits by so much of their size: measured 0.02 at most.
SHARE = 0.1
IDS = torch.tensor([[3, 5, 7, 11, 13]])


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        return model(IDS).logits


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


def test_ours_is_read_there(tiny_teacher: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    quantise(Request(model=tiny_teacher, texts=[torch.tensor([3, 5, 7, 11])], head=True), tmp_path / "ours")
    held = load_file(tmp_path / "ours/model.safetensors")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32).eval()
    linear = theirs.get_submodule("model.layers.0.mlp.down_proj")
    name = "model.layers.0.mlp.down_proj.weight"
    assert linear.quantization_status == "compressed" and torch.equal(linear.weight, held[name])
    assert linear.quantization_scheme.input_activations.dynamic and torch.equal(
        linear.weight_scale, held[f"{name}_scale"]
    )
    original = AutoModelForCausalLM.from_pretrained(tiny_teacher, dtype=torch.float32).eval()
    assert 0 < apart(logits(theirs), logits(original)) < SHARE


def test_theirs_is_read_here(tiny_teacher: Path, tmp_path: Path) -> None:
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
    from transformers import AutoModelForCausalLM

    number = {"num_bits": 8, "symmetric": True}
    rows = number | {"strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": number | {"strategy": "channel"}, "input_activations": rows}
    model = AutoModelForCausalLM.from_pretrained(tiny_teacher, dtype=torch.float32).eval()
    apply_quantization_config(model, QuantizationConfig(config_groups={"all": group}, ignore=["lm_head"]))
    linears = {name: part for name, part in model.named_modules() if hasattr(part, "weight_scale")}
    for part in linears.values():
        part.weight_scale.data = part.weight.abs().amax(1, keepdim=True) / 127
    writer = ModelCompressor.from_pretrained_model(model)
    writer.compress_model(model)
    model.save_pretrained(tmp_path / "theirs")
    writer.update_config(tmp_path / "theirs")
    assert json.loads((tmp_path / "theirs/config.json").read_text())["quantization_config"]["version"] == ct.__version__
    opened, held = Checkpoint.open(tmp_path / "theirs"), load_file(tmp_path / "theirs/model.safetensors")
    assert len(linears) == 14 and len(opened.config.quantised) == 8  # q, k and v are one of ours, gate and up another
    name = "model.layers.0.mlp.down_proj.weight"
    assert torch.equal(opened.matrix("layers.0.down.weight"), held[name].float() * held[f"{name}_scale"])


@pytest.mark.parametrize(
    "asked",
    [{}, {"symmetric": True}, {"group": -1}, {"bits": 8, "group": -1, "symmetric": True}, {"dtype": torch.bfloat16}],
    ids=str,
)
def test_packed_weights_are_unpacked_as_there(tiny_teacher: Path, tmp_path: Path, asked: dict) -> None:
    from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    number = {"num_bits": asked.get("bits", 4), "symmetric": asked.get("symmetric", False)}
    grouped = {"strategy": "channel"} if asked.get("group") == -1 else {"strategy": "group", "group_size": 32}
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**number, **grouped))
    for tensors, ours in both(tiny_teacher, tmp_path / "packed", "compressed-tensors", **asked):
        wanted = PackedQuantizationCompressor.decompress(tensors, scheme)["weight"]
        assert wanted.dtype == ours.dtype and torch.equal(ours, wanted)
