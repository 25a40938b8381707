"""How far texts differ, found again from texts that were made to."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from draftwood.planned import Prior, TextClass
from draftwood.runtime.trace import StepEvent
from draftwood.tools.measure import eases
from draftwood.tools.measure.replay import Text
from draftwood.trees import Topology
from draftwood.trees.prior import hazards_at, odds_of

PATHS = ((0,), (1,), (0, 0), (0, 1), (0, 0, 0))
HAZARDS = (0.5, 0.15, 0.5, 0.2, 0.4)


def _text(random: np.random.Generator, ease: float, steps: int) -> Text:
    """A walk at every position; only those where a decoding would stand are looked at."""
    tree, paths = Topology.from_paths(PATHS), dict(enumerate(((), *PATHS)))
    hazards_T = (1.0, *hazards_at(tree, odds_of(tree, HAZARDS), ease))
    events = []
    for position in range(steps):
        row = 0
        while own := tree.children(row):
            left = 1 - sum(hazards_T[child] for child in own)
            row_or_none = random.choice([*own, -1], p=[*(hazards_T[child] for child in own), left])
            if row_or_none < 0:
                break
            row = int(row_or_none)
        events.append(_event(position, paths[row]))
    return Text("text", greedy=True, events=tuple(events))


def _event(position: int, path: Sequence[int]) -> StepEvent:
    times = dict.fromkeys(("start_us", "draft_us", "verify_us", "accept_us", "host_us"), 0.0)
    return StepEvent(
        kind="verify",
        step=position,
        gear="tree",
        position=position,
        rows=len(PATHS) + 1,
        accepted=len(path) + 1,
        path=tuple(path),
        tokens=(0,) * (len(path) + 1),
        **times,
    )


@pytest.mark.parametrize("spread", [0.1, 0.8])
def test_the_spread_of_made_texts_is_found(spread: float) -> None:
    """With 80 texts of 60 tokens the interval is narrower than what lies between the two."""
    random = np.random.default_rng(3)
    prior = Prior(paths=PATHS, confidence=(1.0,), classes=(TextClass(weight=1.0, hazards=(HAZARDS,)),))
    texts = [_text(random, random.normal(0.0, spread), 60) for _ in range(80)]
    found = eases.fit(np.array([eases.likelihoods(text, prior, ()) for text in texts]))
    assert found["from"] <= spread <= found["to"] and abs(found["centre"]) <= 0.2
    assert found["to"] < 0.6 if spread < 0.6 else found["from"] > 0.4


def test_odds_and_hazards_are_each_others_inverse() -> None:
    tree = Topology.from_paths(PATHS)
    assert np.allclose(hazards_at(tree, odds_of(tree, HAZARDS), 0.0), HAZARDS, atol=1e-6)  # hazards have six digits


def test_traces_without_a_survey_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    (tmp_path / "a.jsonl").write_text('{"format": "x"}\n')
    monkeypatch.setattr(sys, "argv", ["eases", str(tmp_path / "a.jsonl")])
    assert eases.main() == 2 and capsys.readouterr().err.count("\n") == 1
