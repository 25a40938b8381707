"""The migration of outliers from rows into weights, before these are rounded."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftwood.compiler.checkpoints.int8 import PIECE, rounded
from draftwood.kernels.quantised import quantise_rows

# N rows, H inputs, O outputs, P outputs of a piece

# How much of a column's size goes from the rows into the weights: the exponent alpha of SmoothQuant (2211.10438).
_SHARES = (0.0, 0.25, 0.5, 0.75)


def migrated(rows: Sequence[Tensor], weight_OH: Tensor) -> Tensor:
    """Powers of two [H] that multiply the columns of weights; the norm before them is divided by the same.

    A power of two changes no digit of a norm or weight in any element type. The factors are those with the least
    squared error of the rounded product on ``rows`` [N, H]; they are 1 if nothing is better.
    """
    rows_NH, weight_OH = torch.cat(list(rows)).float(), weight_OH.float()
    exact_NO, candidates = rows_NH @ weight_OH.t(), []
    for share in _SHARES:
        factor_H = _factors(rows_NH, weight_OH, share)
        candidates.append((_error(rows_NH, weight_OH, factor_H, exact_NO), factor_H))
    return min(candidates, key=lambda pair: pair[0])[1]


def _factors(rows_NH: Tensor, weight_OH: Tensor, share: float) -> Tensor:
    if not share:
        return torch.ones(rows_NH.shape[1])
    sizes = [
        torch.maximum(high, -low).clamp_min(1e-5) for low, high in (rows_NH.aminmax(dim=0), weight_OH.aminmax(dim=0))
    ]
    factor_H = sizes[0] ** share / sizes[1] ** (1 - share)
    # About 1 in the middle, so that norms stay in the range of their type.
    return torch.exp2((factor_H / factor_H.median()).log2().round().clamp(-8, 8))


def _error(rows_NH: Tensor, weight_OH: Tensor, factor_H: Tensor, wanted_NO: Tensor) -> float:
    """Squared error of the product, computed some outputs at a time to save memory."""
    whole, scale_N1 = quantise_rows(rows_NH / factor_H)
    got_NH, total = whole.float() * scale_N1, 0.0
    for weight_PH, wanted_NP in zip(weight_OH.split(PIECE), wanted_NO.split(PIECE, 1), strict=True):
        weights, scale_P1 = rounded(weight_PH, factor_H)
        total += float((got_NH @ (weights.float() * scale_P1).t() - wanted_NP).square().sum())
    return total
