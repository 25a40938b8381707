"""How far rare paths are shrunk towards the product model: chosen on contexts that made no tree."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from draftwood.trees.calibration import Contexts
from draftwood.trees.measure import curve_visits, standard_error
from draftwood.trees.search import Search, level_marginals, limits, search

STRENGTHS = (0.0, 1.0, 4.0, 16.0, 64.0, 256.0, math.inf)


@dataclass(frozen=True, slots=True)
class Shrinkage:
    """The strength that was chosen, the search made with it, and what each strength gained.

    Args:
        gains: by strength, the mean accept length over trees of 1, 2, ..., n nodes on the tuning contexts;
            empty where there were none.
    """

    strength: float
    search: Search
    gains: dict[float, float]


def shrink(
    counted: Contexts,
    tuning: Contexts,
    nodes: int,
    max_depth: int | None = None,
    max_children: int | None = None,
) -> Shrinkage:
    """The search over `counted` with the strength whose trees gain most on `tuning`.

    Bare counts are kept unless another strength is better by more than the standard error of the difference:
    they are exact for what was counted, and the best of seven is otherwise often the luckiest.

    Raises:
        TreeError: as `search`.
    """
    if not tuning.total:
        return Shrinkage(0.0, search(counted, nodes, max_depth, max_children), {})
    marginals_DK = level_marginals(counted, *limits(counted, nodes, max_depth, max_children))
    searches = {s: search(counted, nodes, max_depth, max_children, s, marginals_DK) for s in STRENGTHS}
    sums = {s: _mean_curve(tuning, found.paths(nodes), nodes) for s, found in searches.items()}
    contexts_F = curve_visits(tuning, [])[:, 0]
    gains = {s: float(sums_F.sum() / contexts_F.sum()) for s, sums_F in sums.items()}
    best = max(STRENGTHS, key=gains.__getitem__)
    ahead = gains[best] - gains[0.0]
    chosen = best if ahead > standard_error(sums[best] - sums[0.0], contexts_F) else 0.0
    return Shrinkage(chosen, searches[chosen], gains)


def _mean_curve(contexts: Contexts, paths: list[tuple[int, ...]], nodes: int) -> NDArray[np.float64]:
    """float64[F]: tokens of each fold, averaged over trees of 1 to `nodes` nodes; a short tree stays as it is."""
    visits_FI = curve_visits(contexts, paths)
    weights_I = 1 - np.arange(-1, len(paths)) / nodes  # node i is in the trees of i nodes and more
    weights_I[0] = 1
    return visits_FI @ weights_I
