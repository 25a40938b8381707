"""Bringing a weight nearer before it is read, which computes nothing."""

from __future__ import annotations

from torch import Tensor
from torch.fx.node import has_side_effect

from draftwood.kernels.contract import Contract


def _prefetch(input: Tensor, dependency: Tensor | None, max_size: int, offset: int = 0) -> None:
    if max_size <= 0 or offset < 0:
        raise ValueError(f"max_size {max_size}, offset {offset}; expected more than 0, and 0 or more")


PREFETCH = Contract(
    "npu_prefetch(Tensor input, Tensor? dependency, int max_size, int offset=0) -> ()",
    reference=_prefetch,
    fake=_prefetch,
)
"""The first ``max_size`` bytes of a weight go to the L2 cache, from when ``dependency`` has been computed."""


def keep_prefetches() -> None:
    """Once it is registered: a graph's passes keep it, though it has no result that anybody reads."""
    has_side_effect(PREFETCH.operator)
