"""Priors of a text before its first step, from counted contexts.

They say how far the teacher went along each tree, and how much easier or harder texts of each length were to draft.

Shape suffixes: F folds, T rows of a tree, N contexts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from draftwood.planned import LengthEase, Prior, log_odds
from draftwood.trees.calibration import LENGTH_STEP, Contexts
from draftwood.trees.measure import visits
from draftwood.trees.topology import Topology

# Bounds in tokens: texts from one up to the next are alike in length. They are octaves, as far as calibrations count.
LENGTHS = (0, *(256 << octave for octave in range(14)))
# A text with fewer counted contexts says less about its ease.
ENOUGH = 16
# The first guess of any text is right: one candidate of one level, by which lengths are compared.
_FIRST = Topology.chain(1)


def counted_prior(contexts: Contexts, trees: Mapping[str, Topology]) -> Prior:
    """The prior of contexts for ``trees`` by name."""
    return Prior(
        reached={name: _reached(contexts, tree) for name, tree in trees.items() if tree.nodes},
        first=_reached(contexts, _FIRST)[0],
        lengths=tuple(_by_length(contexts)),
    )


def _reached(contexts: Contexts, tree: Topology) -> tuple[float, ...]:
    """The share of contexts that come to each level of a tree."""
    visits_T = visits(contexts, tree).sum(0)
    by_level = np.bincount(tree.depths, visits_T, tree.depth + 1)
    return tuple(round(float(level / visits_T[0]), 6) if visits_T[0] else 0.0 for level in by_level[1:])


def _by_length(contexts: Contexts) -> Iterator[LengthEase]:
    """The ease of texts from each length up to the next; none if all contexts have one length.

    Ease is the log-odds of the first candidate, minus its log-odds over all texts. With n texts of a length it is
    shrunk by n / (n + 1): the posterior mean under a normal prior.
    """
    known = contexts.where(contexts.steps_N > 0)
    octave_N = np.searchsorted(LENGTHS, known.steps_N.astype(np.int64) * LENGTH_STEP, side="left") - 1
    octaves = np.unique(octave_N)
    for octave in octaves if len(octaves) > 1 else ():
        visits_FT = visits(known.where(octave_N == octave), _FIRST)
        texts = float(np.minimum(visits_FT[:, 0] / ENOUGH, 1).sum())
        ease = log_odds(visits_FT[:, 1].sum() / visits_FT[:, 0].sum()) - log_odds(_reached(known, _FIRST)[0])
        yield LengthEase(tokens=LENGTHS[octave], ease=round(ease * texts / (texts + 1), 6))
