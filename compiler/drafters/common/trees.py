"""Draft trees grown inside a static graph, one batched pass a level: of fixed shape, or of a shape that it chooses.

Every drafter whose candidates depend on the nodes above them grows its trees so, with its own pass for a level.

A budget tree (EAGLE-2 and 3) grows, then reranks (Li et al., 2024, arXiv 2406.16858). The k best tokens of the root
are the first level. In every level the k best nodes by cumulative log-probability are expanded by k tokens each. The M
best of all nodes stay. A node is never better than its parent, so the parent of a node that stays also stays.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

from draftwood.contract import Sizes
from draftwood.trees import Topology, tensorize
from draftwood.trees.spec import Budget

# n nodes of a depth, E of them with children, S expanded nodes so far, k candidates, M nodes of the tree, T = M + 1
# rows, L = D + 1 places on a path, A = k + (D - 1) * k * k nodes that a budget tree grows

# A token of probability 1 ties with its parent. Taking this from the log-probability for every level keeps the parent
# ahead. It is more than fp32 loses at any score above -1000.
LEVEL_COST = 1e-4


class Growth(Protocol):
    """The rows of one depth that have children, as a drafter has run them; the first are the root alone."""

    def best(self, k: int) -> tuple[Tensor, Tensor]:
        """The k best tokens below every row, best first: the teacher's ids int64 [E, k], log-probabilities [E, k]."""

    def below(self, tokens_E: Tensor, source_E: Tensor | None, masked_ES: Tensor | None) -> Growth:
        """Runs the rows of these tokens below the rows numbered ``source`` (None: each below its own).

        ``masked`` covers all rows run so far, without the root, and then these; it hides those off a row's path (None:
        no row).
        """


def taken(x: Tensor, places: Tensor | None) -> Tensor:
    """Rows of x at places; None means all of them in order, for which nothing has to run."""
    return x if places is None else x.index_select(0, places)


def _places(places: list[int], count: int) -> Tensor | None:
    return None if places == list(range(count)) else torch.tensor(places, dtype=torch.int64)


class _Level(nn.Module):
    """Index tables of one depth; they are constants of the trace. None is one that changes nothing."""

    pick_n: Tensor | None
    parent_n: Tensor | None
    expanded_E: Tensor | None
    source_E: Tensor | None
    masked_ES: Tensor | None

    def __init__(self, width: int, tables: dict[str, Tensor | None]) -> None:
        super().__init__()
        self.width = width
        for name, table in tables.items():
            self.register_buffer(name, table, persistent=False)


class RankTree(nn.Module):
    """Ranks are those of each parent's own distribution; only rows with children are run."""

    # The part of a draft step's contract that ``grow`` gives.
    part = "drafted"

    def __init__(self, topology: Topology) -> None:
        super().__init__()
        assert topology.nodes, "a draft tree has at least one node"
        self.nodes, self.depth = topology.nodes, topology.depth
        self.levels = nn.ModuleList(_Level(*_tables(topology, depth)) for depth in range(1, topology.depth + 1))

    @property
    def sizes(self) -> Sizes:
        """The sizes of what ``grow`` gives."""
        return {"M": self.nodes}

    def grow(self, rows: Growth) -> tuple[Tensor, Tensor]:
        """Tokens int64 [M] in the topology's row order, and their cumulative log-probabilities [M], of the root's
        ``rows``."""
        tokens: list[Tensor] = []
        scores: list[Tensor] = []
        for depth, level in enumerate(cast(Iterable[_Level], self.levels), 1):
            ids_Ek, logp_Ek = rows.best(level.width)
            tokens.append(taken(ids_Ek.flatten(), level.pick_n))
            gained_n = taken(logp_Ek.flatten(), level.pick_n)
            scores.append(taken(scores[-1], level.parent_n) + gained_n if scores else gained_n)
            if depth < len(self.levels):
                rows = rows.below(taken(tokens[-1], level.expanded_E), level.source_E, level.masked_ES)
        return torch.cat(tokens), torch.cat(scores)


def _tables(topology: Topology, depth: int) -> tuple[int, dict[str, Tensor | None]]:
    """Candidates a parent, and the tables of the nodes at ``depth``.

    ``pick`` reads their tokens from the candidates [E, k] of the depth above. ``parent`` reads their parents' scores
    among the n nodes of that depth. ``expanded`` are the nodes with children, ``source`` their parents' rows among the
    E run before. ``masked`` hides every expanded node off their path.
    """
    parents, ranks, depths = topology.parents, topology.ranks, topology.depths
    with_children = set(parents[1:])
    above, here = ([row for row in range(topology.rows) if depths[row] == d] for d in (depth - 1, depth))
    ran = [row for row in above if row in with_children]
    expanded = [row for row in here if row in with_children]
    expanded_so_far = [row for row in range(1, topology.rows) if row in with_children and depths[row] <= depth]
    width = max(ranks[row] for row in here) + 1
    visible = torch.from_numpy(tensorize(topology).mask.copy())
    masked_ES = ~visible[expanded][:, expanded_so_far]
    return width, {
        "pick_n": _places([ran.index(parents[row]) * width + ranks[row] for row in here], len(ran) * width),
        "parent_n": _places([above.index(parents[row]) for row in here], len(above)),
        "expanded_E": _places([here.index(row) for row in expanded], len(here)),
        "source_E": _places([ran.index(parents[row]) for row in expanded], len(ran)),
        "masked_ES": masked_ES if masked_ES.any() else None,
    }


class BudgetDraft(NamedTuple):
    """The tree: the nodes' tokens and scores, and the rows' buffers as ``trees.TreeBuffers`` has them.

    A row precedes its children, and siblings stand by rank. No index is negative; row 0 is the root.
    """

    tokens_M: Tensor
    parents_T: Tensor
    depths_T: Tensor
    mask_TT: Tensor
    paths_TL: Tensor
    scores_M: Tensor


class BudgetTree(nn.Module):
    """M ``nodes`` of at most ``depth`` D, grown by k ``candidates`` a node and k nodes a level.

    Raises:
        TreeError: a size is below 1, or more nodes are to be kept than are grown.
    """

    # The part of a draft step's contract that ``grow`` gives.
    part = "chosen"
    level_cost_A: Tensor

    def __init__(self, nodes: int, depth: int, candidates: int) -> None:
        super().__init__()
        Budget(nodes, depth, candidates)  # refuses sizes that no tree has
        self.nodes, self.depth, self.candidates = nodes, depth, candidates
        sizes = torch.tensor([candidates] + [candidates**2] * (depth - 1))
        cost_A = torch.arange(depth).repeat_interleave(sizes) * LEVEL_COST
        self.register_buffer("level_cost_A", cost_A, persistent=False)

    @property
    def sizes(self) -> Sizes:
        """The sizes of what ``grow`` gives."""
        return {"M": self.nodes, "T": self.nodes + 1, "P": self.depth + 1}

    def grow(self, rows: Growth) -> BudgetDraft:
        """Grows the tree below the root's ``rows`` and keeps the best M nodes."""
        k = self.candidates
        ids, logp = rows.best(k)
        order_k = torch.arange(k, device=ids.device)
        tokens, scores, parents = [ids.flatten()], [logp.flatten()], [torch.zeros_like(order_k)]
        # The frontier: its nodes' places in the list of all, the rows just run that they hang under, and the
        # nodes run so far that they see.
        place_k, source_k = order_k, torch.zeros_like(order_k)
        itself_kk = order_k[:, None] == order_k
        seen_kS, tokens_k, scores_k = itself_kk, tokens[0], scores[0]
        for depth in range(1, self.depth):
            rows = rows.below(tokens_k, source_k, ~seen_kS)
            ids, logp = rows.best(k)
            tokens.append(ids.flatten())
            scores.append((logp + scores_k[:, None]).flatten())
            parents.append((place_k + 1)[:, None].expand(k, k).flatten())
            scores_k, best_k = scores[-1].topk(k)
            tokens_k, source_k = tokens[-1].index_select(0, best_k), best_k // k
            place_k = best_k + (k + (depth - 1) * k * k)
            seen_kS = torch.cat((seen_kS.index_select(0, source_k), itself_kk), 1)
        return self._rerank(torch.cat(tokens), torch.cat(scores), torch.cat(parents))

    def _rerank(self, tokens_A: Tensor, scores_A: Tensor, parents_A: Tensor) -> BudgetDraft:
        """``parents`` are places in the list of all nodes, counted from 1; 0 is the root."""
        # Sorted as numbers of float32, which holds them exactly: an NPU sorts whole numbers on its AI CPU.
        kept_M = (scores_A - self.level_cost_A).topk(self.nodes).indices.float().sort().values.long()
        # A parent's row is the number of kept places before and with it, for kept places ascend.
        parents_M = (kept_M < parents_A.index_select(0, kept_M)[:, None]).sum(1)
        parents_T = torch.cat((torch.zeros_like(parents_M[:1]), parents_M))
        depths_T, paths_TL = self._paths(parents_T)
        mask_TT = (paths_TL[:, :, None] == torch.arange(self.nodes + 1, device=paths_TL.device)).any(1)
        tokens_M, scores_M = tokens_A.index_select(0, kept_M), scores_A.index_select(0, kept_M)
        return BudgetDraft(tokens_M, parents_T, depths_T, mask_TT, paths_TL, scores_M)

    def _paths(self, parents_T: Tensor) -> tuple[Tensor, Tensor]:
        """(depths [T], paths [T, L]): climbing D times reaches the root from everywhere."""
        climb = [torch.arange(self.nodes + 1, device=parents_T.device)]
        for _ in range(self.depth):
            climb.append(parents_T.index_select(0, climb[-1]))
        climb_TL = torch.stack(climb, 1)
        depths_T = (climb_TL != 0).sum(1)
        steps_TL = (depths_T[:, None] - torch.arange(self.depth + 1, device=parents_T.device)).clamp(min=0)
        return depths_T, climb_TL.gather(1, steps_TL)


def grown(tree: Topology | Budget) -> RankTree | BudgetTree:
    """The grower of a tree of at least one node."""
    return BudgetTree(tree.nodes, tree.depth, tree.width) if isinstance(tree, Budget) else RankTree(tree)
