"""A trained teacher and drafter go the whole line by commands: plan, build, check, tune, bench."""

import json
from pathlib import Path

import pytest

from draftwood.runtime.bundle import Bundle
from draftwood.runtime.policy import widest_gear
from draftwood.tests import fixtures
from draftwood.tools.cli import main
from draftwood.tools.commands import tune
from draftwood.tools.prompts import BUILT_IN


@pytest.mark.slow  # the usual run has the line of docs/own-model.md: test_documents
def test_planned_trees_of_a_trained_drafter_change_no_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tune, "SECONDS", 0.1)
    plan, bundle, prompts = tmp_path / "plan.json", tmp_path / "bundle", tmp_path / "prompts.jsonl"
    stats = [str(fixtures.EAGLE3 / f"{text}.stats") for text in ("greedy", "sampled")]
    assert main(["plan", *stats, "--max-nodes", "4", "--max-gears", "2", "--out", str(plan)]) == 0
    model = [str(fixtures.TEACHER), "--drafter", str(fixtures.EAGLE3), "--int8-drafter"]
    assert main(["build", *model, "--tree", f"plan:{plan}", "--kv", "512", "--out", str(bundle)]) == 0
    lines = BUILT_IN.read_text().splitlines(keepends=True)
    prompts.write_text(lines[0])
    assert main(["check", str(bundle), "--prompts", str(prompts)]) == 0
    assert main(["tune", str(bundle)]) == 0
    prompts.write_text("".join(lines[:4]))
    capsys.readouterr()
    # By name: on a busy machine the adaptive policy may see no tree that is worth its time.
    asked = ["--prompts", str(prompts), "--max-new-tokens", "32", "--policy", widest_gear(Bundle.open(bundle))]
    assert main(["bench", str(bundle), *asked, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] and report["turns"] == report["identical"] == 4
    assert report["accept_length"]["mean"] > 1  # some drafts hit
