"""A Llama written as an openPangu: the same function to the bit, and all that follows from it."""

import json
import sys
from pathlib import Path

import pytest
import torch

from draftwood.compiler.teachers.checkpoint import Checkpoint
from draftwood.compiler.training.teacher import FrozenTeacher
from draftwood.tests import fixtures, pangu
from draftwood.tools import cli


def test_a_trained_teacher_as_an_openpangu_computes_the_same_bits(tmp_path: Path) -> None:
    written = pangu.convert(fixtures.TEACHER, tmp_path / "pangu")
    assert written.config.family == "pangu-embedded" and written.config.qkv_bias and written.config.o_bias
    ids = torch.randint(0, 8192, (2, 24), generator=torch.Generator().manual_seed(0))
    llama, ours = (FrozenTeacher.open(folder) for folder in (fixtures.TEACHER, tmp_path / "pangu"))
    assert torch.equal(llama.states(ids, (0, 4)), ours.states(ids, (0, 4)))
    assert (tmp_path / "pangu" / "tokenizer.json").read_bytes() == (fixtures.TEACHER / "tokenizer.json").read_bytes()


def test_what_is_no_plain_llama_is_refused(
    tiny_teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = pangu.convert(tiny_teacher, tmp_path / "first")
    assert Checkpoint.open(tmp_path / "first").digest() == first.digest()
    for teacher, out, message in (
        (tmp_path / "first", "second", "expected a Llama"),
        (tiny_teacher, "first", "exists already"),
    ):
        monkeypatch.setattr(sys, "argv", ["pangu", "--teacher", str(teacher), "--out", str(tmp_path / out)])
        assert pangu.main() == 2 and message in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first"]


@pytest.mark.slow
def test_an_openpangu_with_its_heads_is_lowered_and_accepts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its heads are of the same function, so they are its heads: 1.5 tokens a step and more."""
    pangu.convert(fixtures.TEACHER, tmp_path / "pangu")
    heads = str(fixtures.MEDUSA)
    built = ["build", str(tmp_path / "pangu"), "--drafter", heads, "--tree", "backbone:4:4", "--kv", "512"]
    assert cli.main([*built, "--target", "onnx,ge", "--out", str(tmp_path / "bundle")]) == 0
    assert cli.main(["check", str(tmp_path / "bundle")]) == 0
    capsys.readouterr()
    words = ["bench", str(tmp_path / "bundle"), "--policy", "backbone-4-4-kv512", "--json"]
    assert cli.main(words) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] and report["accept_length"]["mean"] >= 1.5
