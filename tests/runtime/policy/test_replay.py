"""The policy on texts like SmolLM2's, against plain decoding and the fixed gear that is best in hindsight."""

import numpy as np
import pytest

from draftwood.runtime.policy import gains

from .replay import cells, compared


def means() -> tuple[float, float, float]:
    """Geometric means over plain decoding and over the best fixed gear, and the least of the latter."""
    found = [compared(cell)[:2] for cell in cells(texts=(1,), tokens=(128,), timed=("tuned",))]
    speeds, ratios = np.exp(np.log(found).mean(0))
    return float(speeds), float(ratios), min(ratio for _, ratio in found)


def test_it_is_as_fast_as_the_best_fixed_gear_which_nobody_knows_beforehand() -> None:
    """The seed gives 1.26, 1.000 and 0.958 (``python -m draftwood.tests.runtime.policy.replay`` has all cells)."""
    speed, over_best, least = means()
    assert speed > 1.2 and over_best > 0.992 and least > 0.94


@pytest.mark.slow
def test_a_policy_that_learns_nothing_of_its_texts_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gains.Ease, "saw", lambda *args: None)
    assert means()[1] < 0.99  # 0.983
