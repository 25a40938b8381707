"""A drafter's tree and looked-up tokens, as one tree of as many rows.

Of the nodes of both, those stay that the teacher most likely reaches. The drafter gives that chance by its
probabilities, the text by how often it repeated itself after matches of that length. So a step takes as long as one
with the drafter's tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import exp, log

import numpy as np

from draftwood.runtime.speculation.lookup import LOOKED_UP
from draftwood.runtime.speculation.step import Draft
from draftwood.trees import Topology, TreeBuffers, tensorize

RankPath = tuple[int, ...]


def merged(draft: Draft, ahead: Sequence[tuple[int, float]]) -> Draft:
    """The draft with the likeliest of ``ahead`` instead of its least likely nodes.

    Args:
        ahead: what the text goes on with if it does as before: tokens, each with the chance that it goes on so as far
            as that. A token that the drafter proposes at the same place is that node; others get rank `LOOKED_UP`.
    """
    nodes = _nodes(draft)
    first, at = next(iter(nodes)), RankPath()
    for token, chance in ahead:
        known = (path for path in nodes if path[:-1] == at and nodes[path][0] == token)
        at = next(known, (*at, LOOKED_UP))
        nodes[at] = token, max(chance, nodes[at][1] if at in nodes else 0.0)
    # The drafter's first node stays, at any worth: its confidence is the step's.
    best = sorted(nodes, key=lambda path: (path != first, -nodes[path][1], len(path)))[: len(draft.scores_M)]
    if not any(LOOKED_UP in path for path in best):
        return draft
    topology, tree = _tree(frozenset(best))
    tokens, chances = zip(*(nodes[path] for path in topology.paths), strict=True)
    scores_M = np.array([draft.scores_M[0], *(log(max(chance, 1e-30)) for chance in chances[1:])], np.float32)
    return draft._replace(tokens_T=np.array([draft.tokens_T[0], *tokens], np.int64), scores_M=scores_M, tree=tree)


def _nodes(draft: Draft) -> dict[RankPath, tuple[int, float]]:
    """The drafter's nodes by rank path: tokens, and the chances that the teacher comes to them."""
    paths, scores, places = [RankPath()], [0.0], dict[RankPath, tuple[int, float]]()
    rows = zip(draft.tree.parents.tolist(), draft.tree.ranks.tolist(), draft.tokens_T.tolist(), strict=True)
    for (parent, rank, token), score in zip(list(rows)[1:], draft.scores_M.tolist(), strict=True):
        paths.append((*paths[parent], rank))
        # If levels are ranked a score is the candidate's own.
        scores.append(min(score + (scores[parent] if draft.candidates_IK is not None else 0.0), scores[parent]))
        places[paths[-1]] = token, exp(scores[-1])
    return places


@lru_cache(1024)
def _tree(paths: frozenset[RankPath]) -> tuple[Topology, TreeBuffers]:
    topology = Topology.from_paths(sorted(paths))
    return topology, tensorize(topology)
