"""`draftwood export`: a trained drafter in the layouts of others."""

from pathlib import Path

import pytest
import torch

from draftwood.compiler.drafters.registry import open_drafter
from draftwood.compiler.teachers.checkpoint import Checkpoint
from draftwood.tests import fixtures
from draftwood.tools.cli import main


@pytest.mark.parametrize("layout", ["speculators", "specforge"])
def test_a_drafter_is_read_back(layout: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / layout
    assert main(["export", layout, str(fixtures.EAGLE3), str(fixtures.TEACHER), "--out", str(out)]) == 0
    assert capsys.readouterr().out.startswith(f"{out}: eagle3, ")
    assert [path.name for path in tmp_path.iterdir()] == [layout]
    # A server may run as another user.
    assert (out / "model.safetensors").stat().st_mode == (out / "config.json").stat().st_mode
    teacher = Checkpoint.open(fixtures.TEACHER)
    before, after = (open_drafter(path, teacher) for path in (fixtures.EAGLE3, out))
    for name in before.checkpoint.names():
        assert torch.equal(before.checkpoint.weight(name), after.checkpoint.weight(name))
    assert after.model.aux_layers == before.model.aux_layers


def test_a_drafter_is_named_as_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By ``demo-eagle3``, too."""
    folders = {"demo": fixtures.TEACHER, "demo-eagle3": fixtures.EAGLE3}
    monkeypatch.setattr("draftwood.tools.demo.resolve", folders.__getitem__)
    assert main(["export", "specforge", "demo-eagle3", "demo", "--out", str(tmp_path / "out")]) == 0
    assert "eagle3, " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([str(fixtures.FASTEAGLE), "--out", "new"], "speculators: no other engine serves fasteagle drafters"),
        ([str(fixtures.EAGLE3), "--out", "."], ": exists already; expected a new folder"),
        ([str(fixtures.EAGLE3), "--out", "/dev/null/new"], "/dev/null/new: cannot be written"),
    ],
)
def test_refusals_are_one_line(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["export", "speculators", *arguments, str(fixtures.TEACHER)]) == 2
    assert said in (error := capsys.readouterr().err) and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
