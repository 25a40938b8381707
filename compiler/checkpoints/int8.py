"""Int8 matrices with a scale for each output."""

from __future__ import annotations

import torch
from torch import Tensor

from draftwood.kernels.quantised import LARGEST, LEAST

# O outputs, H inputs, P outputs of a piece

SCALE = "_scale"  # follows the key of the matrix, which ends in "weight"
PIECE = 4096


def rounded(weight_OH: Tensor, factor_H: Tensor | float = 1.0) -> tuple[Tensor, Tensor]:
    """int8 [O, H] and the scales of its outputs, float32 [O, 1]: the nearest of 255 steps, halves to even.

    Columns are multiplied by ``factor`` first. Outputs are taken some at a time: no fp32 copy of all is made.
    """
    whole_OH, scale_O1 = torch.empty(weight_OH.shape, dtype=torch.int8), torch.empty(len(weight_OH), 1)
    for start in range(0, len(weight_OH), PIECE):
        piece = slice(start, start + PIECE)
        part_PH = weight_OH[piece].float() * factor_H
        scale_O1[piece] = part_PH.abs().amax(1, keepdim=True).clamp_min(LEAST) / LARGEST
        whole_OH[piece] = (part_PH / scale_O1[piece]).round().to(torch.int8)
    return whole_OH, scale_O1
