"""Operators that round rows as they make them: the kernels' arithmetic, in numpy and in the order of their source."""

import numpy as np
import pytest
import torch
from torch import Tensor

from draftwood.kernels.quantised import quantise_rows
from draftwood.kernels.rounded import ADD_RMS_NORM_DYNAMIC_QUANT, DEQUANT_SWIGLU_QUANT, swiglu_fits

# T rows, H features
T, H = 16, 320
EPSILON = 1e-5
F32 = np.float32


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def norm(x1: Tensor, x2: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    whole, _, total, scale, _ = ADD_RMS_NORM_DYNAMIC_QUANT.operator(x1, x2, gamma, epsilon=EPSILON)
    return whole, total, scale


def swiglu(x: Tensor) -> tuple[Tensor, Tensor]:
    return DEQUANT_SWIGLU_QUANT.operator(x, activate_left=True, quant_mode=1)


def test_a_norm_is_rounded_from_the_sum_in_fp32() -> None:
    """Whole numbers may part by one if a quotient lies on a half; the scale is two divisions, one ulp each."""
    x1, x2, gamma = noise(T, H, seed=0), noise(T, H, seed=1), noise(H, seed=2)
    whole, total, scale = norm(x1, x2, gamma)
    x_TH = x1.double().numpy() + x2.double().numpy()
    y_TH = x_TH / np.sqrt((x_TH**2).mean(-1, keepdims=True) + EPSILON) * gamma.double().numpy()
    largest = np.abs(y_TH).max(-1)
    assert total.dtype is torch.bfloat16 and torch.equal(total, x1 + x2)
    np.testing.assert_allclose(scale.numpy(), largest / 127, rtol=3e-7)
    np.testing.assert_allclose(whole.numpy(), y_TH / largest[:, None] * 127, atol=0.5 + 1e-3)
    unfused = quantise_rows(torch.ops.npu.npu_add_rms_norm(x1, x2, gamma, EPSILON)[0])[0]
    assert not torch.equal(whole, unfused), "the rounding to bfloat16 in between is gone"


def test_a_gated_activation_is_rounded_from_fp32() -> None:
    """Exact but for the exponential, whose last bits differ between libraries and move a half now and then."""
    x = noise(T, 2 * H, seed=3) * 4
    whole, scale = swiglu(x)
    gate, up = np.split(x.float().numpy(), 2, -1)
    gated = gate / (F32(1) + np.exp(-gate)) * up
    want = np.abs(gated).max(-1) / F32(127)
    np.testing.assert_allclose(scale.numpy(), want, rtol=3e-7)
    apart = whole.numpy() != np.rint(gated * (F32(1) / want[:, None])).astype(np.int8)
    assert apart.mean() < 1e-3 and np.abs(whole.numpy()).max() == 127


@pytest.mark.parametrize("rows", [1, 5])
def test_a_row_does_not_depend_on_the_others(rows: int) -> None:
    x1, x2, gamma = noise(T, H, seed=0), noise(T, H, seed=1), noise(H, seed=2)
    for among, alone in ((norm(x1, x2, gamma), norm(x1[:rows], x2[:rows], gamma)), (swiglu(x1), swiglu(x1[:rows]))):
        assert all(torch.equal(one[:rows], other) for one, other in zip(among, alone, strict=True))


def test_a_row_of_zeros_is_zeros_with_the_scale_0() -> None:
    nothing = torch.zeros(2, H, dtype=torch.bfloat16)
    for whole, *_, scale in (norm(nothing, nothing, noise(H, seed=2)), swiglu(nothing)):
        assert not whole.any() and not scale.any()


def test_products_of_rounded_rows_are_those_that_round_them() -> None:
    """The scale of a row of zeros is 0 here and the least one there, and both give zeros."""
    x, bias = noise(5, H, seed=4), noise(7, seed=5)
    weight = torch.randint(-128, 128, (H, 7), dtype=torch.int8, generator=torch.Generator().manual_seed(6))
    scale, (whole, rows) = noise(7, seed=7).float().abs(), quantise_rows(x)
    got = torch.ops.draftwood.rounded_linear(whole, rows[:, 0], weight, scale, bias, torch.bfloat16)
    assert torch.equal(got, torch.ops.draftwood.quantised_linear(x, weight, scale, bias))


def test_what_has_no_reference_is_refused() -> None:
    x = noise(2, H, seed=0)
    with pytest.raises(NotImplementedError, match="norm of a sum"):
        ADD_RMS_NORM_DYNAMIC_QUANT.operator(x, x, x[0], beta=x[0])
    with pytest.raises(NotImplementedError, match="half type's gated activation"):
        DEQUANT_SWIGLU_QUANT.operator(x, quant_mode=0)


def test_the_documented_limit_of_an_activation() -> None:
    assert swiglu_fits(4864, 64) and not swiglu_fits(4916, 64) and not swiglu_fits(12800, 1)
