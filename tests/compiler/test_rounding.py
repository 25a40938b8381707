"""Plain numbers rounded by ``--precision``: how far, and in which layers."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftwood.compiler.checkpoints.blocks import BLOCK, rounded_to_eight, rounded_to_four
from draftwood.compiler.teachers.checkpoint import Checkpoint
from draftwood.compiler.teachers.conversion import Precision, in_precision
from draftwood.errors import RequestError
from draftwood.tests.packed_checkpoints import save_packed


def errors(got: Tensor, want: Tensor) -> Tensor:
    """Squared, by blocks."""
    return (got - want).double().square().unflatten(1, (-1, BLOCK)).sum(-1)


def spread(matrix: Tensor) -> Tensor:
    """Every block at 16 even steps from its smallest number to its largest, as most programs round without a search."""
    blocks = matrix.unflatten(1, (-1, BLOCK))
    low, high = blocks.amin(-1, keepdim=True), blocks.amax(-1, keepdim=True)
    step = (high - low).clamp_min(1e-30) / 15
    return (((blocks - low) / step).round() * step + low).flatten(1)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(["normal", "laplace", "outlier", "grid", "one"]), st.integers(-20, 20))
def test_four_bits_err_at_most_as_much_as_even_steps(seed: int, kind: str, power: int) -> None:
    random = torch.Generator().manual_seed(seed)
    matrix = torch.randn(3, 4 * BLOCK, generator=random)
    if kind == "laplace":
        matrix = matrix.sign() * torch.empty_like(matrix).exponential_(generator=random)
    elif kind == "outlier":
        matrix[0, 7] *= 300
    elif kind == "grid":
        steps = torch.randint(0, 16, (3, 4, BLOCK), generator=random)
        steps[..., 3], steps[..., 9] = 0, 15  # both ends, or the steps of a block are anybody's guess
        matrix = steps.flatten(1) * 0.25 - 1.5
    elif kind == "one":
        matrix = torch.full_like(matrix, 0.7)
    matrix *= 2.0**power
    four = rounded_to_four(matrix)
    assert four.whole_OH.max() < 16 and four.bits == 4
    # fp32's own rounding of the numbers, compared with the gain of a search.
    least = matrix.double().square().unflatten(1, (-1, BLOCK)).sum(-1) * 1e-11
    found = errors(four.product(), matrix)
    assert (found <= errors(spread(matrix), matrix) * 1.0001 + least).all()
    if kind in ("grid", "one"):
        assert (found <= least).all()


def test_four_bits_of_random_numbers_err_less_than_a_search_of_scales_alone_would() -> None:
    """Of normal numbers even steps err 0.080 of their size; a scale and a smallest number by least squares 0.073."""
    matrix = torch.randn(256, 1024, generator=torch.Generator().manual_seed(0))
    error = (rounded_to_four(matrix).product() - matrix).norm() / matrix.norm()
    assert error < 0.075


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_eight_bits_are_within_half_a_step_whatever_the_type(kind: torch.dtype) -> None:
    matrix = torch.randn(5, 3 * BLOCK, generator=torch.Generator().manual_seed(0)).to(kind)
    matrix[0, :BLOCK] = 0
    eight = rounded_to_eight(matrix)
    step = eight.scale_OG.repeat_interleave(BLOCK, 1)
    assert ((eight.product() - matrix.float()).abs() <= step * 0.5001).all()


@pytest.mark.parametrize(("precision", "bits"), [("nbits", {4}), ("nbits8", {8}), ("nbits-head", {4}), ("w8a8", set())])
@pytest.mark.parametrize("family", ["Llama", "Qwen3Moe"])
def test_every_layer_is_rounded_as_is_said(
    save_llama: Callable, tmp_path: Path, precision: Precision, bits: set[int], family: str
) -> None:
    mixture = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "head_dim": 16}
    save_llama(tmp_path, family=family, **(mixture if family == "Qwen3Moe" else {}))
    exact = Checkpoint.open(tmp_path)
    found = in_precision(exact, precision)
    kept = {one.name: one for one in found.config.packed}
    head = kept.pop("lm_head", None)
    assert {one.bits for one in kept.values()} == bits and all(one.minimum == (one.bits == 4) for one in kept.values())
    assert (head is not None and head.bits == 8) == (precision != "nbits-head")
    assert ("lm_head" in found.config.quantised) == (precision == "nbits-head")
    named = {*kept, *found.config.quantised} - {"lm_head"}
    inside = ("qkv", "o") if family == "Qwen3Moe" else ("qkv", "o", "gate_up", "down")
    assert named == {f"layers.{i}.{name}" for i in range(2) for name in inside}
    for name in found.names():
        assert torch.isfinite(found.weight(name).float()).all()
    # Nothing else has changed.
    for name in exact.names():
        layer = name.rpartition(".")[0]
        if layer not in named and layer != "lm_head":
            assert torch.equal(found.weight(name), exact.weight(name)), name


def test_a_tied_output_matrix_of_odd_width_stays_exact(save_llama: Callable, tmp_path: Path) -> None:
    """It fits no blocks of 32 inputs; the layers become W8A8 all the same."""
    save_llama(tmp_path, hidden_size=40, tie_word_embeddings=True)
    found = in_precision(Checkpoint.open(tmp_path), "w8a8")
    assert found.config.tied and not found.config.packed
    assert "layers.0.qkv" in found.config.quantised and "lm_head" not in found.config.quantised


def test_what_a_packed_teacher_has_left_plain_gets_eight_bits(save_llama: Callable, tmp_path: Path) -> None:
    save_llama(tmp_path / "plain")
    save_packed(tmp_path / "plain", tmp_path / "packed", "awq")
    head = in_precision(Checkpoint.open(tmp_path / "packed"), "nbits").config.packed[-1]
    assert (head.name, head.bits) == ("lm_head", 8)


@pytest.mark.parametrize(
    ("precision", "npu", "said"),
    [
        ("nbits", True, "has no matrix that is packed in four bits with groups of a multiple of .*; choose w8a8"),
        ("nbits8", True, "takes packed weights of four bits alone; choose w8a8"),
    ],
)
def test_what_an_npu_cannot_take_is_said(tiny_teacher: Path, precision: Precision, npu: bool, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        in_precision(Checkpoint.open(tiny_teacher), precision, npu=npu)
