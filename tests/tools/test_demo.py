import json
from pathlib import Path

import numpy as np
import pytest

from draftwood.runtime.bundle import Bundle
from draftwood.tools import demo
from draftwood.tools.cli import main
from draftwood.trees import Topology
from draftwood.trees.prior import counted_prior


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
