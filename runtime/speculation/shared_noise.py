"""A draft graph's noise: that of the teacher's draws, so that the graph proposes the drawn tokens.

A level's row is that of the level's position, times the temperature, by the ids that the drafter can propose. A
position is drafted for several times until the text has passed it, so its row is kept. For a forbidden token the noise
is a number that no logit makes up for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from draftwood.errors import BundleError
from draftwood.manifest import TensorSignature
from draftwood.noise import RepeatedIds, gumbel_row, key_of
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.speculation.sampling import Sampling

# D levels, U draft vocabulary, V vocabulary

_KEPT = 64  # positions
# Finite: logits stay numbers, and those that are forbidden come last.
_FORBIDDEN = np.float32(-1e9)


class SharedNoise:
    """Rows of noise for a bundle's draft graphs; not for several threads at once."""

    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle
        # By shape and place.
        self._arrays: dict[tuple[tuple[int, int], int], NDArray[np.float32]] = {}
        self._row: Callable[[int, int], NDArray[np.float32]] = lru_cache(_KEPT)(self._made)

    def rows(
        self,
        spec: TensorSignature,
        sampling: Sampling,
        position: int,
        place: int = 0,
        allowed: Sequence[NDArray[np.bool_]] = (),
    ) -> NDArray[np.float32]:
        """The input ``spec`` [D, U] for levels that begin at a position, valid until the next call for its ``place`` in
        a launch.

        ``allowed`` bool [V] are the tokens that may be proposed, of the first levels.

        Raises:
            BundleError: the graph's draft vocabulary is not the bundle's.
        """
        shape, ids_U = self.shape(spec), self._bundle.draft_ids
        noise_DU = self._arrays.setdefault((shape, place), np.empty(shape, np.float32))
        if sampling.greedy:
            noise_DU.fill(0)
        else:
            for level, row_U in enumerate(noise_DU):
                np.multiply(self._row(sampling.seed, position + level), np.float32(sampling.temperature), out=row_U)
        for row_U, allowed_V in zip(noise_DU, allowed, strict=False):
            row_U[~(allowed_V if ids_U is None else allowed_V[ids_U])] = _FORBIDDEN
        return noise_DU

    def _made(self, seed: int, position: int) -> NDArray[np.float32]:
        key, ids = key_of(seed, position), self._ids
        row_U = gumbel_row(self._bundle.manifest.dims.vocabulary, key) if ids is None else ids.gumbels(key)
        return row_U.astype(np.float32)

    @cached_property
    def _ids(self) -> RepeatedIds | None:
        """The draft vocabulary; None if it is the teacher's."""
        ids_U = self._bundle.draft_ids
        return None if ids_U is None else RepeatedIds.of(ids_U)

    def shape(self, spec: TensorSignature) -> tuple[int, int]:
        """[D, U] of the input ``spec``; BundleError if U is not the bundle's draft vocabulary."""
        levels, width = (int(size) for size in spec.shape)
        ids_U = self._bundle.draft_ids
        known = self._bundle.manifest.dims.vocabulary if ids_U is None else len(ids_U)
        if width != known:
            raise BundleError(
                f"{self._bundle.folder}: a draft graph takes noise of {width} tokens; expected {known}; build it again"
            )
        return levels, width
