"""The gain of trees on calibration contexts, with an interval that allows for correlated contexts.

Shape suffixes: N distinct contexts, F folds, T rows of a tree.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from draftwood.errors import TreeError
from draftwood.trees.calibration import END, FOLDS, Contexts
from draftwood.trees.plan_file import ExpectedLength
from draftwood.trees.topology import Topology

# 97.5 % quantiles of Student's t for 1, 2, ... degrees of freedom; as many folds as one part can have.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)


def visits(contexts: Contexts, topology: Topology) -> NDArray[np.float64]:
    """float64[F, T]: contexts of each fold whose truth passes through each row; all of them at the root."""
    child_TK = _children(topology)
    rows, at = np.arange(len(contexts.counts_N)), np.zeros(len(contexts.counts_N), np.int64)
    visits_FT = np.zeros((FOLDS, topology.rows))
    visits_FT[:, 0] = np.bincount(contexts.folds_N, contexts.counts_N, FOLDS)
    for level in range(min(topology.depth, contexts.depth)):
        at = child_TK[at, contexts.ranks_ND[rows, level]]
        rows, at = rows[at > 0], at[at > 0]
        slot = contexts.folds_N[rows].astype(np.int64) * topology.rows + at
        visits_FT += np.bincount(slot, contexts.counts_N[rows], visits_FT.size).reshape(visits_FT.shape)
    return visits_FT


def mean_of_folds(sums_F: NDArray[np.float64], contexts_F: NDArray[np.float64]) -> ExpectedLength | None:
    """The mean over all contexts of what adds up to `sums_F` in each fold; None without contexts.

    The interval is that of a ratio estimator whose observations are folds (Cochran, Sampling Techniques, 6.5). It is
    right however alike the contexts of one fold are.
    """
    total = contexts_F.sum()
    if not total:
        return None
    mean = float(sums_F.sum() / total)
    clusters = int((contexts_F > 0).sum())
    if clusters < 2:
        return ExpectedLength(tokens=mean, interval=None, contexts=int(total))
    half = _t(clusters - 1) * standard_error(sums_F, contexts_F)
    return ExpectedLength(tokens=mean, interval=(mean - half, mean + half), contexts=int(total))


def standard_error(sums_F: NDArray[np.float64], contexts_F: NDArray[np.float64]) -> float:
    """The standard error of `mean_of_folds`; infinite if fewer than two folds have contexts."""
    clusters, total = int((contexts_F > 0).sum()), contexts_F.sum()
    if clusters < 2:
        return math.inf
    residual_F = sums_F - sums_F.sum() / total * contexts_F
    return float(np.sqrt(clusters / (clusters - 1) * (residual_F**2).sum()) / total)


def curve(contexts: Contexts, paths: list[tuple[int, ...]]) -> NDArray[np.float64]:
    """float64[n + 1]: the expected accept length of the first 0, 1, ..., n of nested nodes.

    Raises:
        TreeError: no contexts.
    """
    topology = Topology.from_paths(paths)
    row = {path: i for i, path in enumerate(topology.paths, 1)}
    visits_I = visits(contexts, topology).sum(0)[[0, *(row[path] for path in paths)]]
    if not visits_I[0]:
        raise TreeError("plan: no contexts to take the expected accept length over")
    return np.cumsum(visits_I) / visits_I[0]


def tokens(contexts: Contexts, topologies: Sequence[Topology]) -> NDArray[np.float64]:
    """float64[len(topologies)]: tokens that each gains, one step in every context; one walk serves them all."""
    union = Topology.from_paths({path for topology in topologies for path in topology.paths})
    row = {path: i for i, path in enumerate(union.paths, 1)}
    visits_T = visits(contexts, union).sum(0)
    return np.array([visits_T[[0, *(row[path] for path in topology.paths)]].sum() for topology in topologies])


def _children(topology: Topology) -> NDArray[np.int64]:
    """int64[T, END + 1]: the child row by rank; 0, the root's row, if there is no child."""
    child_TK = np.zeros((topology.rows, END + 1), np.int64)
    parents, ranks = np.array(topology.parents[1:], int), np.array(topology.ranks[1:], int)
    usable = ranks < END  # no calibrated path has a larger rank
    child_TK[parents[usable], ranks[usable]] = np.arange(1, topology.rows)[usable]
    return child_TK


def _t(freedom: int) -> float:
    if freedom <= len(_T):
        return _T[freedom - 1]
    # Expansion in 1 / freedom (Abramowitz and Stegun, 26.7.5), here good to three digits.
    z = 1.959964
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
