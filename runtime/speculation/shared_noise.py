"""What a draft graph adds to its logits: the noise that the teacher will draw with, so that it proposes what is drawn.

A level's row is that of the level's position, times the temperature, by the ids that the drafter can propose. A
position is drafted for several times until the text has passed it, so its row is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from draftwood.errors import BundleError
from draftwood.manifest import TensorSignature
from draftwood.noise import gumbel_row, key_of
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.speculation.sampling import Sampling

# D levels, U draft vocabulary

_KEPT = 64  # positions


class SharedNoise:
    """Rows of noise for a bundle's draft graphs; not for several threads at once."""

    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle
        # By shape: one array that stays zero, and one that is filled anew.
        self._arrays: dict[tuple[int, int], tuple[NDArray[np.float32], NDArray[np.float32]]] = {}
        self._row: Callable[[int, int], NDArray[np.float32]] = lru_cache(_KEPT)(self._made)

    def rows(self, spec: TensorSignature, sampling: Sampling, position: int) -> NDArray[np.float32]:
        """The input ``spec`` [D, U] for levels that begin at a position, valid until the next call.

        Zeros for greedy text, always the same array, so that nothing is computed or bound anew.

        Raises:
            BundleError: the graph's draft vocabulary is not the bundle's.
        """
        shape = self._shape(spec)
        if shape not in self._arrays:
            self._arrays[shape] = np.zeros(shape, np.float32), np.empty(shape, np.float32)
        zeros_DU, noise_DU = self._arrays[shape]
        if sampling.greedy:
            return zeros_DU
        for level, row_U in enumerate(noise_DU):
            np.multiply(self._row(sampling.seed, position + level), np.float32(sampling.temperature), out=row_U)
        return noise_DU

    def _made(self, seed: int, position: int) -> NDArray[np.float32]:
        row_V, ids_U = gumbel_row(self._bundle.manifest.dims.vocabulary, key_of(seed, position)), self._bundle.draft_ids
        return (row_V if ids_U is None else row_V[ids_U]).astype(np.float32)

    def _shape(self, spec: TensorSignature) -> tuple[int, int]:
        levels, width = (int(size) for size in spec.shape)
        ids_U = self._bundle.draft_ids
        known = self._bundle.manifest.dims.vocabulary if ids_U is None else len(ids_U)
        if width != known:
            raise BundleError(
                f"{self._bundle.folder}: a draft graph takes noise of {width} tokens; expected {known}; build it again"
            )
        return levels, width
