"""Comparisons of graphs and of texts: what fails is never hidden by what passes."""

from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from draftwood.runtime.options import Options
from draftwood.tools.commands.check import _table
from draftwood.tools.comparison.compare import Comparison, worst
from draftwood.tools.comparison.differences import explain


def compared(difference: float, tolerance: float, quantity: str = "logits") -> Comparison:
    return Comparison(
        gear="plain",
        graph="step",
        graphs="cpu",
        quantity=quantity,
        difference=difference,
        tolerance=tolerance,
        where="",
    )


def test_a_comparison_that_fails_is_the_worst_however_small_its_difference() -> None:
    fine, failed, near = compared(0.5, 0.6), compared(0.4, 0.1), compared(0.09, 0.1)
    assert worst([fine, failed, near]) == worst([failed, near, fine]) == [failed]
    assert worst([fine, near]) == [near]
    assert worst([fine, compared(float("nan"), 1.0)])[0].ok is False
    assert [one.quantity for one in worst([fine, compared(0.0, 0.0, "choice")])] == ["logits", "choice"]


@pytest.mark.parametrize("temperature", [0.0, 1e-6])
@pytest.mark.parametrize(("tokens", "tie"), [((3, 4), True), ((4, 3), True), ((3, 77), False), ((4, 77), False)])
def test_only_tokens_that_the_teacher_nearly_drew_are_a_tie(
    tokens: tuple[int, int], tie: bool, temperature: float
) -> None:
    """Two are as good as equal. A third one is a fault, however close these two are."""
    logits_V = np.full(100, -50, np.float32)
    logits_V[[3, 4]] = 1.0, 1.0 - 1e-6
    manifest = SimpleNamespace(gears=[SimpleNamespace(slots=128)])
    engine: Any = SimpleNamespace(
        bundle=SimpleNamespace(manifest=manifest),
        begin=lambda slots: None,
        prefill=lambda state, ids: SimpleNamespace(logits_RV=logits_V[None]),
    )
    options = Options.of(temperature=temperature)
    found = explain(engine, "text", [1, 2], [9, tokens[0]], [9, tokens[1]], options, 1e-4)
    assert (found.position, found.tie) == (1, tie)
    assert not explain(engine, "text", [1, 2], [9, 3], [9], options, 1e-4).tie


def test_the_table_shows_what_fails_and_the_largest_allowed_difference() -> None:
    table = _table([asdict(one) for one in (compared(0.4, 0.1), compared(0.5, 0.6), compared(0.2, 0.3))])
    assert table == {("allowed", "cpu"): {"logits": "6e-01"}, ("plain", "cpu"): {"logits": "4.0e-01 !"}}
