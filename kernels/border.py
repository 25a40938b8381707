"""Marks in a trace between one decoder block and the next, where it may be cut (`draftwood.compiler.steps.short`)."""

from __future__ import annotations

import torch
from torch import Tensor

from draftwood.kernels.contract import Contract, marks


def _border(input: Tensor, number: int, side: int) -> Tensor:
    return input.clone()


def _border_fake(input: Tensor, number: int, side: int) -> Tensor:
    return torch.empty_like(input)


def _border_onnx(input, number: int, side: int):  # type: ignore[no-untyped-def]
    return marks.Border(input, number=number, side=side)


BORDER = Contract(
    "border(Tensor input, int number, int side) -> Tensor",
    reference=_border,
    fake=_border_fake,
    onnx=_border_onnx,
    namespace="draftwood",
)
