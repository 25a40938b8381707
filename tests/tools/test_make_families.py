"""`make` as a newcomer uses it: on a checkpoint of every family that transformers writes, and on wrong ones."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from draftwood.runtime.bundle import Bundle
from draftwood.tests.bpe import save_tokenizer, train_tokenizer
from draftwood.tools.cli import main

FIELDS = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
MIXTURE = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
FAMILIES = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {"head_dim": 24},
    "Qwen3Moe": {**MIXTURE, "mlp_only_layers": [0]},
    "Mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "Mistral": {"sliding_window": 512},
    "Glm4": {"head_dim": 24, "pad_token_id": 0},
}
TEXTS = ("the cat sat on the mat", "one two three one two", "a b c a b c a", "the hat the hat", "and so on and so")


def written(folder: Path, family: str) -> Path:
    """A random model of a family in bf16, with a tokenizer, as transformers writes it."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**FIELDS, **FAMILIES[family])
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(torch.bfloat16)
    with torch.no_grad():  # a text that repeats, so that what is looked up hits
        model.lm_head.weight.copy_(model.get_input_embeddings().weight)
    model.save_pretrained(folder)
    save_tokenizer(train_tokenizer([{"text": text} for text in TEXTS] * 9, FIELDS["vocab_size"]), folder)
    return folder


def prompts_in(folder: Path) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"id": str(n), "prompt": text}) + "\n" for n, text in enumerate(TEXTS)))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_what_transformers_writes_is_made(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, out = written(tmp_path / family, family), tmp_path / "bundle"
    line = ["make", model, "--prompts", prompts_in(tmp_path), "--kv", 256, "--precision", "exact", "--batch-size", 1]
    line += ["--out", out]
    assert main([*map(str, line)]) == 0, capsys.readouterr().err
    report = json.loads((tmp_path / "bundle.make" / "report.json").read_text())
    assert report["ok"] and report["bench"]["identical"] == report["bench"]["turns"]
    assert Bundle.open(out).manifest.teacher.config["family"] == json.loads((model / "config.json").read_text())[
        "model_type"
    ].replace("_", "-")


def config_with(**fields: object) -> Callable[[Path], object]:
    def change(model: Path) -> None:
        path = model / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return change


def tensors_with(change: Callable[[dict], object]) -> Callable[[Path], object]:
    def rewrite(model: Path) -> None:
        path = model / "model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)

    return rewrite


def cut(model: Path) -> None:
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


# What is wrong, how it comes to be so, and a word that the line has to say.
WRONG = {
    "no folder": (shutil.rmtree, "no such file"),
    "no config": (lambda model: (model / "config.json").unlink(), "config.json"),
    "config is no JSON": (lambda model: (model / "config.json").write_text("{"), "config.json"),
    "no weights": (lambda model: (model / "model.safetensors").unlink(), "safetensors"),
    "weights cut short": (cut, "model.safetensors"),
    "another architecture": (config_with(architectures=["GPT2LMHeadModel"]), "GPT2LMHeadModel"),
    "a tensor is missing": (tensors_with(lambda all: all.pop("model.norm.weight")), "model.norm.weight"),
    "a tensor has another shape": (config_with(intermediate_size=128), "shape"),
    "a tensor too many": (tensors_with(lambda all: all.update({"x.weight": torch.ones(2)})), "x.weight"),
    "a bad activation": (config_with(hidden_act="gelu"), "hidden_act"),
    "heads that do not divide": (config_with(num_key_value_heads=3), "kv_heads"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_checkpoint_ends_in_one_line(
    wrong: str, tmp_path: Path, tiny_teacher: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, word = WRONG[wrong]
    model, out = shutil.copytree(tiny_teacher, tmp_path / "model"), tmp_path / "bundle"
    change(model)
    assert main(["make", str(model), "--prompts", str(prompts_in(tmp_path)), "--kv", "256", "--out", str(out)]) == 2
    (line,) = capsys.readouterr().err.splitlines()[-1:]
    print(line)
    assert word in line and not out.exists()
