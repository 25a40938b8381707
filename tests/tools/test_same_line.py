"""Every command that takes a teacher says the same of the same fault."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from draftwood.tools.cli import main


def config(**fields: Any) -> Callable[[Path], None]:
    """Changes fields of config.json; None takes one away."""

    def damage(folder: Path) -> None:
        path = folder / "config.json"
        changed = json.loads(path.read_text()) | fields
        path.write_text(json.dumps({name: value for name, value in changed.items() if value is not None}))

    return damage


def tensors(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / "model.safetensors"
        held = load_file(path)
        change(held)
        save_file(held, path)

    return damage


FAULTS: dict[str, Callable[[Path], object]] = {
    "no architectures": config(architectures=None),
    "another architecture": config(architectures=["GPT2LMHeadModel"]),
    "an unknown activation": config(hidden_act="gelu"),
    "an unknown rope": config(rope_scaling={"type": "longrope", "factor": 2.0}),
    "an end beyond the vocabulary": config(eos_token_id=999_999),
    "another end beyond it": lambda folder: (folder / "generation_config.json").write_text('{"eos_token_id": 999999}'),
    "no config": lambda folder: (folder / "config.json").unlink(),
    "an adapter": lambda folder: (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}'),
    "an adapter alone": lambda folder: (folder / "config.json").rename(folder / "adapter_config.json"),
    "no JSON": lambda folder: (folder / "config.json").write_text("{"),
    "UTF-16": lambda folder: (folder / "config.json").write_bytes('{"a": 1}'.encode("utf-16")),
    "half a file": lambda folder: (folder / "model.safetensors").write_bytes(
        (folder / "model.safetensors").read_bytes()[:9000]
    ),
    "a tensor missing": tensors(lambda held: held.pop("model.norm.weight")),
    "a tensor more": tensors(lambda held: held.update(extra=held["model.norm.weight"].clone())),
    "a tokenizer of another form": lambda folder: (folder / "tokenizer.json").rename(folder / "tokenizer.model"),
    "another shape": tensors(lambda held: held.update({"model.norm.weight": held["model.norm.weight"][:9].clone()})),
}
# MODEL and OUT stand for the teacher and for what is to be made.
COMMANDS: dict[str, tuple[str, ...]] = {
    "inspect": ("inspect", "MODEL"),
    "build": ("build", "MODEL", "--out", "OUT"),
    "make": ("make", "MODEL", "--prompts", "PROMPTS", "--out", "OUT"),
    "quantize": ("quantize", "MODEL", "PROMPTS", "--out", "OUT"),
    "distill": ("distill", "MODEL", "--data", "PROMPTS", "--out", "OUT"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_has_one_line(
    fault: str, tiny_teacher: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    teacher = tmp_path / "teacher"
    shutil.copytree(tiny_teacher, teacher)
    FAULTS[fault](teacher)
    (tmp_path / "prompts.jsonl").write_text(
        "".join(f'{{"id": "{n}", "prompt": "the cat sat on the mat", "text": "the cat"}}\n' for n in range(40))
    )
    names = {"MODEL": str(teacher), "OUT": str(tmp_path / "out"), "PROMPTS": str(tmp_path / "prompts.jsonl")}
    said: dict[str, str] = {}
    for name, words in COMMANDS.items():
        assert main([names.get(word, word) for word in words]) == 2, name
        said[name] = capsys.readouterr().err
    assert len(set(said.values())) == 1 and said["build"].count("\n") == 1, "".join(said.values())


@pytest.mark.parametrize("command", sorted(COMMANDS.keys() - {"inspect"}))
def test_a_bundle_is_no_teacher(
    command: str, tiny_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'{{"id": "{n}", "prompt": "the cat", "text": "the cat"}}\n' for n in range(9)))
    names = {"MODEL": str(tiny_bundle), "OUT": str(tmp_path / "out"), "PROMPTS": str(prompts)}
    assert main([names.get(word, word) for word in COMMANDS[command]]) == 2
    said = f"draftwood: error: {tiny_bundle}: a bundle; expected a teacher: a Hugging Face folder or a GGUF file\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize("name", ["model.gguf", "model"])
def test_a_links_own_name_says_what_a_file_is(
    name: str, tiny_heads: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Caches of downloads link a model's name to a file that is named by its digest."""
    (tmp_path / "0a1b2c").write_bytes(b"no model")
    (tmp_path / name).symlink_to("0a1b2c")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'{{"id": "{n}", "prompt": "the cat", "text": "the cat"}}\n' for n in range(9)))
    names = {"MODEL": str(tmp_path / name), "OUT": str(tmp_path / "out"), "PROMPTS": str(prompts)}
    counts = ("calibrate", "MODEL", "--drafter", str(tiny_heads), "--out", "OUT")
    said = {"model.gguf": "begins with b'no m'; expected GGUF", "model": "a file whose name does not end in .gguf"}
    for words in {*COMMANDS.values(), counts} - ({COMMANDS["inspect"]} if name == "model" else set()):
        assert main([names.get(word, word) for word in words]) == 2, words
        assert capsys.readouterr().err.startswith(f"draftwood: error: {tmp_path / name}: {said[name]}"), words


# WRONG stands for a path that cannot be one; the others are what they are called.
PLACES = (
    "build WRONG --out OUT", "build MODEL --out WRONG", "build MODEL --drafter WRONG --out OUT",
    "build MODEL --tree plan:WRONG --out OUT", "build MODEL --tree lookup:chain:3 --corpus WRONG --out OUT",
    "make WRONG --prompts PROMPTS --out OUT", "make MODEL --prompts WRONG --out OUT",
    "make MODEL --prompts PROMPTS --out WRONG", "make MODEL --drafter WRONG --prompts PROMPTS --out OUT",
    "calibrate WRONG --out OUT", "calibrate WRONG --drafter HEADS --out OUT",
    "calibrate MODEL --drafter WRONG --out OUT",
    "calibrate BUNDLE --prompts WRONG --out OUT", "profile WRONG --out OUT", "plan WRONG --out OUT",
    "distill WRONG --own-prompts 1 --out OUT", "distill MODEL --data WRONG --out OUT",
    "distill MODEL --data PROMPTS --rows 1 --max-new-tokens 1 --out WRONG", "train medusa MODEL WRONG --out OUT",
    "quantize WRONG PROMPTS --out OUT", "quantize MODEL WRONG --out OUT", "quantize MODEL PROMPTS --out WRONG",
    "export vllm MODEL WRONG --out OUT", "export vllm MODEL HEADS --out WRONG", "bind WRONG MODEL", "inspect WRONG",
    "check WRONG", "tune WRONG", "bench WRONG", "bench BUNDLE --prompts WRONG", "run WRONG --prompt x",
    "run BUNDLE --chat WRONG.json", "serve WRONG",
)  # fmt: skip


@pytest.mark.parametrize("wrong", ["a circle of links", "a long name", "a path through a file"])
def test_a_path_that_cannot_be_one_is_refused_in_one_line_wherever_it_stands(
    wrong: str,
    tiny_teacher: Path,
    tiny_heads: Path,
    tiny_bundle: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    prompts, out, circle = tmp_path / "prompts.jsonl", tmp_path / "out", tmp_path / "circle"
    prompts.write_text("".join(f'{{"id": "{n}", "prompt": "the cat", "text": "the cat sat"}}\n' for n in range(9)))
    circle.symlink_to("circle")
    path = {"a circle of links": circle, "a long name": tmp_path / ("n" * 300), "a path through a file": prompts / "x"}
    names = {"WRONG": path[wrong], "MODEL": tiny_teacher, "HEADS": tiny_heads, "BUNDLE": tiny_bundle, "OUT": out}
    names["PROMPTS"] = prompts
    for place in PLACES:
        words = [str(names.get(word, word)).replace("WRONG", str(path[wrong])) for word in place.split()]
        assert main(words) == 2, place
        said = capsys.readouterr().err.splitlines()
        assert len(said) == 1 and said[0].startswith("draftwood: error: "), (place, said)
        assert not out.exists(), place
