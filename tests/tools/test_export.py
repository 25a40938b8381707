"""`draftwood export`: a shipped drafter in the layouts of others."""

from pathlib import Path

import pytest
import torch

from draftwood.compiler.drafters.registry import open_drafter
from draftwood.compiler.teachers.checkpoint import Checkpoint
from draftwood.tools.cli import main
from draftwood.tools.demo import resolve


@pytest.mark.parametrize("layout", ["speculators", "specforge"])
def test_the_demos_drafter_is_read_back(layout: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / layout
    assert main(["export", layout, "demo-eagle3", "--model", "demo", "--out", str(out)]) == 0
    assert capsys.readouterr().out.startswith(f"{out}: eagle3, ")
    assert [path.name for path in tmp_path.iterdir()] == [layout]
    teacher = Checkpoint.open(resolve("demo"))
    before, after = (open_drafter(path, teacher) for path in (resolve("demo-eagle3"), out))
    for name in before.checkpoint.names():
        assert torch.equal(before.checkpoint.weight(name), after.checkpoint.weight(name))
    assert after.model.aux_layers == before.model.aux_layers


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["demo-fasteagle", "--out", "new"], "speculators: no other engine serves fasteagle drafters"),
        (["demo-eagle3", "--out", "."], ": exists already; expected a new folder"),
        (["demo-eagle3", "--out", "/dev/null/new"], "/dev/null/new: cannot be written"),
    ],
)
def test_refusals_are_one_line(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["export", "speculators", *arguments, "--model", "demo"]) == 2
    assert said in (error := capsys.readouterr().err) and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
