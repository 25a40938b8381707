"""The noise that a sampled text's teacher drew with, as its drafter's levels share it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from draftwood.compiler.training.batch import Batch
from draftwood.noise import gumbel_row, key_of
from draftwood.runtime.speculation.sampling import Sampling

# N contexts, B texts, V draft vocabulary, T teacher's vocabulary


@dataclass(frozen=True)
class BatchNoise:
    """A batch's: called with a level and some of its contexts it gives the numbers added to the logits, float32 [N, V].

    Args:
        samplings: those of the batch's texts; greedy ones have no noise.
        ids_V: the teacher's ids that the drafter may propose, None for all.
        vocabulary: T.
    """

    batch: Batch
    samplings: Sequence[Sampling]
    ids_V: Tensor | None
    vocabulary: int

    def __call__(self, level: int, part: slice) -> Tensor:
        row_N, place_N = (index[part] for index in self.batch.there_BC.nonzero().unbind(1))
        position_N = (self.batch.slot_BC[row_N, place_N] + 2 + level).tolist()
        rows = [self._row(self.samplings[row], at) for row, at in zip(row_N.tolist(), position_N, strict=True)]
        noise_NT = torch.from_numpy(np.stack(rows)).to(self.batch.ids_BS.device)
        return noise_NT if self.ids_V is None else noise_NT[:, self.ids_V]

    def _row(self, sampling: Sampling, position: int) -> np.ndarray:
        if sampling.greedy:
            return np.zeros(self.vocabulary, np.float32)
        row_T = sampling.temperature * gumbel_row(self.vocabulary, key_of(sampling.seed, position))
        return row_T.astype(np.float32)
