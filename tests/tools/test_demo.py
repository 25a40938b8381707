import json
from pathlib import Path

import pytest

from draftwood.runtime.bundle import Bundle
from draftwood.tools import demo
from draftwood.tools.cli import main


def test_the_demo_runs_the_whole_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """At the native size, which is quick; what is answered does not depend on the size."""
    assert main(["demo", "--size", "native", "--out", str(tmp_path / "b"), "--max-new-tokens", "24", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] and report["check_ok"] and len(report["prompts"]) == 12
    assert all(prompt["tokens_equal"] for prompt in report["prompts"])
    assert {"tokens", "accept_length", "plain_tokens_per_s", "speculative_tokens_per_s", "speedup"} <= set(
        report["prompts"][0]
    )
    assert sum(prompt["accept_length"] for prompt in report["prompts"]) > 12  # some drafts hit
    assert Bundle.open(Path(report["bundle"])).manifest.drafter is not None


def test_the_shipped_models_stay_small() -> None:
    assert sum(path.stat().st_size for path in demo.FOLDER.rglob("*") if path.is_file()) < 40e6


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(("drafter", "levels"), [("demo-medusa", 4), ("demo-fasteagle", 5), ("demo-eagle3", 8)])
def test_the_counts_fit_the_drafter(temperature: float, drafter: str, levels: int) -> None:
    paths = demo.rank_paths(temperature, drafter)
    assert paths.contexts > 2_000
    tree = paths.best_tree(15)
    assert tree.depth <= levels and 1.5 < paths.expected_accept_length(tree) < levels
