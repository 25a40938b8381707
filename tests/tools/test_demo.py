import json
from pathlib import Path

import numpy as np
import pytest

from draftwood.runtime.bundle import Bundle
from draftwood.runtime.policy.tuned import tuned_times
from draftwood.tests.gguf_files import save_gguf
from draftwood.tools import demo
from draftwood.tools.cli import main
from draftwood.tools.commands import demo as command
from draftwood.tools.commands import serve
from draftwood.tools.comparison import check
from draftwood.tools.demo import fetch, language_model
from draftwood.trees import Topology
from draftwood.trees.prior import counted_prior


def test_the_demo_runs_the_whole_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At the native size, which is quick; what is answered does not depend on the size."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name, value in (("TUNE_SECONDS", 0.1), ("ROUNDS", 1), ("NEW_TOKENS", 32)):
        monkeypatch.setattr(command, name, value)
    assert main(["demo", "--drafter", "demo-eagle3-w8a8", "--size", "native"]) == 0
    said = capsys.readouterr().out
    assert "12 of 12 answers are plain decoding's" in said and "<- the fixed tree that promises most" in said
    assert "comparisons with eager PyTorch passed." in said
    bundle = Bundle.open(next((tmp_path / "draftwood").glob("demo-*/manifest.json")).parent)
    assert bundle.manifest.drafter is not None and bundle.manifest.planning is not None
    rows, gears = [line.split() for line in said.splitlines()], [gear.name for gear in bundle.manifest.gears]
    assert [row[0] for row in rows if row and row[0] in gears] == gears
    answers = [row for row in rows if len(row) == 8 and row[2] in ("yes", "NO")]
    assert len(answers) == 12 and sum(float(row[6]) for row in answers) > 12  # some drafts hit
    assert tuned_times(bundle, "cpu", None)
    # The same as JSON, of the bundle that is there; what is checked was, above.
    monkeypatch.setattr(check, "check", lambda *_: {"ok": True})
    assert main(["demo", "--drafter", "demo-eagle3-w8a8", "--size", "native", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] and report["check_ok"] and len(report["prompts"]) == 12
    assert all(prompt["tokens_equal"] for prompt in report["prompts"])
    assert set(report["speedup"]) == {"fixed", "adaptive"} and report["bundle"] == str(bundle.folder)
    assert all(prompt[way]["tokens_per_s"] > 0 for prompt in report["prompts"] for way in command.WAYS)
    assert [gear["gear"] for gear in report["gears"]] == gears


def test_without_a_drafter_it_asks_a_language_model(
    tiny_teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A tiny file in the blocks of SmolLM2's takes its place."""
    save_gguf(tiny_teacher, tmp_path / "model.gguf", "Q4_1")
    monkeypatch.setattr(fetch, "model", lambda: tmp_path / "model.gguf")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name, value in (("SLOTS", 512), ("PREFILL_ROWS", (32,)), ("SEQUENCES", 2)):
        monkeypatch.setattr(language_model, name, value)
    for name, value in (("TUNE_SECONDS", 0.1), ("NEW_TOKENS", 16)):
        monkeypatch.setattr(command, name, value)
    assert main(["demo", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] and len(report["prompts"]) == 12 and sum(gear["fixed"] for gear in report["gears"]) == 1
    bundle = Bundle.open(Path(report["bundle"]))
    assert bundle.manifest.packed and max(graph.batch for graph in bundle.manifest.graphs_of("onnx")) == 2
    assert tuned_times(bundle, "cpu", None)
    # The same bundle again, as text; serve demo takes it.
    assert main(["demo"]) == 0
    said = capsys.readouterr().out
    assert "12 of 12 answers are plain decoding's" in said and "The answer to 'gravity'" in said
    assert serve.demo_bundle() == bundle.folder
    assert demo.resolve("smollm2") == tmp_path / "model.gguf"


def test_a_size_is_of_the_shipped_teacher_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--size", "native"]) == 2
    assert "--size native: is of the shipped teacher" in capsys.readouterr().err


def test_the_shipped_models_stay_small() -> None:
    assert sum(path.stat().st_size for path in demo.FOLDER.rglob("*") if path.is_file()) < 40e6


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("drafter", demo.DRAFTERS)
def test_the_counts_fit_the_drafter(sampled: bool, drafter: str) -> None:
    counted = demo.counted(drafter, sampled)
    assert counted.contexts.total > 2_000 and counted.grouped
    assert counted.sampled == (counted.contexts.total if sampled else 0)
    paths = counted.rank_paths()
    tree = paths.best_tree(15)
    assert demo.can_draft(drafter, tree) and 1.5 < paths.expected_accept_length(tree) < 1 + tree.depth


@pytest.mark.parametrize("drafter", [name for name in demo.DRAFTERS if name != "demo-medusa"])
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_texts_behind_documents_are_believed_to_be_harder(drafter: str, sampled: bool) -> None:
    """By every drafter that looks at the text; Medusa's heads look at one state."""
    prior = counted_prior(demo.counted(drafter, sampled).contexts, [Topology.chain(4)], ())
    accepted = [np.cumprod(hazards).sum() for (hazards,) in (one.hazards for one in prior.classes)]
    found = {one.tokens: float(np.dot(one.weights, accepted)) for one in prior.lengths}
    assert set(found) == {0, 256, 512, 1024} and found[0] > 1.05 * found[1024]
