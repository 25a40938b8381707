"""The least release that a set of features needs."""

import pytest

from draftwood.versions import LEAST, least_cann, release


@pytest.mark.parametrize(
    ("older", "newer"), [("8.1.RC1", "8.1.0"), ("8.1.RC1", "8.5.0"), ("8.5.0.alpha002", "8.5.0"), ("8.5.0", "8.10.0")]
)
def test_releases_are_ordered(older: str, newer: str) -> None:
    assert release(older) < release(newer)


def test_the_newest_feature_decides() -> None:
    assert least_cann(["RotaryMul", "Add"]) == "8.1.RC1"
    assert least_cann(["RotaryMul", "FusedInferAttentionScore"]) == "8.5.0"
    assert least_cann(["Add"]) == ""
    assert all(need.source for need in LEAST)
