"""The least release that a set of features needs."""

import pytest

from draftwood.versions import LEAST, least_cann, npu_problem, release


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ("8.1.RC1", "8.1.0"),
        ("8.1.RC1", "8.5.0"),
        ("8.5.0.alpha002", "8.5.0"),
        ("8.5.0", "8.10.0"),
        ("9.1.0", "9.2.0-beta.2"),
        ("9.2.0-beta.2", "9.2.0"),
    ],
)
def test_releases_are_ordered(older: str, newer: str) -> None:
    assert release(older) < release(newer)


def test_the_newest_feature_decides() -> None:
    assert least_cann(["RotaryMul", "Add"]) == "8.1.RC1"
    assert least_cann(["RotaryMul", "FusedInferAttentionScore"]) == "8.5.0"
    assert least_cann(["Add"]) == ""
    assert all(need.source for need in LEAST)


@pytest.mark.parametrize(
    ("torch_npu", "cann"),
    [("2.7.1.post2", "8.5.0"), ("2.7.1.post4", "9.0.0"), ("2.7.1.post8", "9.1.0"), ("2.6.0.post5", "8.5.0")],
)
def test_older_torches_have_a_torch_npu_for_every_cann(torch_npu: str, cann: str) -> None:
    assert npu_problem(torch_npu, cann) == ""
    assert f"{torch_npu} is published for CANN {cann}" in npu_problem(torch_npu, "8.2.RC1")


@pytest.mark.parametrize(
    ("torch_npu", "cann"),
    [
        ("2.8.0.post2", "8.5.1"),
        ("2.9.0", "8.5.1"),
        ("2.9.0.post1+git4c901a4", "8.5.1"),
        ("2.10.0", "9.0.0"),
        ("2.10.0.post2", "9.0.1"),
        ("2.10.0.post4", "9.1.0"),
    ],
)
def test_the_images_of_vllm_ascend_hold_what_fits(torch_npu: str, cann: str) -> None:
    """v0.13.0rc3 to v0.23.0; a repair of CANN has no row of its own in Ascend's table."""
    assert npu_problem(torch_npu, cann) == ""
    assert "goes torch_npu" in npu_problem("2.13.0", cann)
