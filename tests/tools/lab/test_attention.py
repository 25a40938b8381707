"""A drafter's attention by distance, where it can be worked out by hand, and the section on tiny bundles."""

from pathlib import Path

import numpy as np
import pytest
import torch

from draftwood.compiler.drafters.common.layers import DraftLayer
from draftwood.runtime.bundle import Bundle
from draftwood.tools.lab import bundles, opened
from draftwood.tools.lab.attended import by_distance, features_of
from draftwood.tools.lab.report.contents import contents
from draftwood.tools.lab.run import evaluate
from draftwood.tools.lab.section import Table
from draftwood.tools.lab.sections.attention import BUCKETS, bucketed, largest
from draftwood.tools.lab.suite import Ask, Suite
from draftwood.tools.reference.eager import EagerEngine

TEXT = [5, 9, 11, 7, 40, 5, 9, 13, 60, 61]


@pytest.mark.parametrize("kind", ["eagle3", "fasteagle"])
def test_a_level_sees_the_text_and_the_draft_before_it(tiny_draft_bundles: dict[str, Path], kind: str) -> None:
    engine = EagerEngine(Bundle.open(tiny_draft_bundles[kind]))
    found = by_distance(engine, TEXT, features_of(engine, TEXT), 3)
    # Slot j stands for token j + 1. A level of EAGLE-3 adds a row, one of FastEagle does not.
    assert [one.shape for one in found] == [(4, size) for size in ([9, 10, 11] if kind == "eagle3" else [9, 9, 9])]
    assert np.allclose([one.sum(1) for one in found], 1, rtol=0, atol=1e-12)
    assert len({one.round(9).tobytes() for one in found}) == 3


@pytest.mark.parametrize("kind", ["eagle3", "fasteagle"])
def test_heads_without_queries_look_everywhere_alike(tiny_draft_bundles: dict[str, Path], kind: str) -> None:
    engine = EagerEngine(Bundle.open(tiny_draft_bundles[kind]))
    for layer in (one for one in engine.drafter.modules() if isinstance(one, DraftLayer)):
        layer.qkv.weight = torch.nn.Parameter(torch.zeros_like(layer.qkv.weight))
    for one in by_distance(engine, TEXT, features_of(engine, TEXT), 3):
        assert np.allclose(one, 1 / one.shape[1], rtol=0, atol=1e-12)


def test_buckets_hold_powers_of_two() -> None:
    counts = bucketed(np.ones(300))
    assert counts.tolist() == [1, 1, 2, 4, 8, 16, 32, 64, 128, 44] and len(counts) == len(BUCKETS)


def test_a_heads_largest_weight_is_found() -> None:
    weights_NS = np.zeros((4, 300))
    weights_NS[[0, 1, 2, 3], [0, 299, 5, 280]] = 1
    assert bucketed(largest(weights_NS)).tolist() == [0.25, 0, 0, 0.25, 0, 0, 0, 0, 0, 0.5]


def test_the_section_measures_and_shows(
    tiny_draft_bundles: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundles, "planned_bundle", lambda size, drafter, *_: tiny_draft_bundles[drafter[5:]])
    monkeypatch.setattr(opened, "TUNE_SECONDS", 0.01)
    asked = Ask(lengths=(60,), limit=1, max_new_tokens=6)
    rows = evaluate(Suite(name="a", tries=1, sections={"attention": asked}), tmp_path / "run", tmp_path / "work").rows
    # A tiny FastEagle has fewer levels; shares are rounded to six places.
    assert [np.shape(row["found"]["shares"]) for row in rows] == [(5, len(BUCKETS)), (3, len(BUCKETS))]
    for of in ("shares", "tops"):
        assert all(np.allclose(np.sum(row["found"][of], -1), 1, rtol=0, atol=1e-5) for row in rows)
    (tables,) = ([b for b in c.blocks if isinstance(b, Table)] for c in contents(tmp_path / "run").chapters)
    assert [{line[0] for line in table.lines} for table in tables] == [{"eagle3", "fasteagle"}] * 2
