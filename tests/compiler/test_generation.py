"""The sampling of a model's authors, from generation_config.json to the manifest."""

import json
import shutil
from pathlib import Path

import pytest

from draftwood.compiler.bundle.build import build
from draftwood.compiler.bundle.request import BuildRequest
from draftwood.compiler.teachers.checkpoint import Checkpoint
from draftwood.compiler.teachers.formats import usual_sampling
from draftwood.compiler.teachers.generation import FILE
from draftwood.errors import CheckpointError
from draftwood.manifest import UsualSampling, read_manifest
from draftwood.tests.gguf_files import save_gguf
from draftwood.trees import Topology

from .test_bundle import nothing_is_lowered

# As Qwen2.5-Instruct has it.
QWEN = {
    "bos_token_id": 151643, "pad_token_id": 151643, "do_sample": True, "eos_token_id": [151645, 151643],
    "repetition_penalty": 1.05, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "transformers_version": "4.37.0",
}  # fmt: skip


def test_the_manifest_has_it(tiny_teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing_is_lowered(monkeypatch)
    model = shutil.copytree(tiny_teacher, tmp_path / "model")
    (model / FILE).write_text(json.dumps(QWEN | {"eos_token_id": 1}))
    trees = (("plain", Topology.plain()),)
    build(BuildRequest(model=model, drafter=None, trees=trees, slots=(128,)), tmp_path / "bundle")
    assert read_manifest(tmp_path / "bundle").teacher.sampling == UsualSampling(
        temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.05
    )


@pytest.mark.parametrize(
    ("values", "read"),
    [
        ({}, {}),
        ({"temperature": None, "top_k": 50}, {"top_k": 50}),
        ({"top_k": -1, "min_p": 0.0, "temperature": 1}, {"top_k": 0, "min_p": 0.0, "temperature": 1.0}),
        ({"do_sample": False, "num_beams": 4}, {}),
    ],
    ids=str,
)
def test_values(tmp_path: Path, values: dict, read: dict) -> None:
    (tmp_path / FILE).write_text(json.dumps(values))
    assert usual_sampling(tmp_path) == UsualSampling(**read)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"top_p": 1.5}, "top_p is 1.5; expected `float` <= 1.0"),
        ({"temperature": -1}, "temperature is -1; expected `float` >= 0.0"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0; expected `float` >= 0.01"),
        ({"top_k": "many"}, "top_k is 'many'; expected a whole number"),
        ({"top_k": 2**40}, "top_k is 1099511627776; expected `int` <= 2147483647"),
        ({"temperature": float("nan")}, "temperature is nan; expected a finite number"),
        ({"min_p": True}, "min_p is True; expected a finite number"),
    ],
    ids=str,
)
def test_a_value_out_of_range_is_refused(tmp_path: Path, values: dict, said: str) -> None:
    (tmp_path / FILE).write_text(json.dumps(values))
    with pytest.raises(CheckpointError) as caught:
        usual_sampling(tmp_path)
    assert str(caught.value) == f"{tmp_path / FILE}: {said}"


def test_a_folder_without_the_file_has_what_config_json_says(tmp_path: Path) -> None:
    assert usual_sampling(tmp_path) == UsualSampling()
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 64, "top_p": 0.8, "temperature": None}))
    assert usual_sampling(tmp_path) == UsualSampling(top_p=0.8)
    (tmp_path / FILE).write_text(json.dumps({"temperature": 0.7}))
    assert usual_sampling(tmp_path) == UsualSampling(temperature=0.7)


def test_a_gguf_file_has_it_in_its_metadata(tiny_teacher: Path, tmp_path: Path) -> None:
    path, usual = tmp_path / "model.gguf", {"temp": 0.7, "top_k": 20, "top_p": 0.95, "penalty_repeat": 1.05}
    save_gguf(tiny_teacher, path, **{f"general.sampling.{key}": value for key, value in usual.items()})
    read = UsualSampling(temperature=0.7, top_k=20, top_p=0.95, repetition_penalty=1.05)
    assert usual_sampling(path) == read
    (tmp_path / "copied").mkdir()
    Checkpoint.open(path).reader.copy_texts(tmp_path / "copied")
    assert usual_sampling(tmp_path / "copied") == read
    save_gguf(tiny_teacher, path, **{"general.sampling.top_p": 2.0})
    with pytest.raises(CheckpointError, match=r"model.gguf: general.sampling.top_p is 2.0; expected `float` <= 1.0"):
        usual_sampling(path)
    save_gguf(tiny_teacher, path)
    assert usual_sampling(path) == UsualSampling()
