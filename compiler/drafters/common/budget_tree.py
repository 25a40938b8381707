"""A draft tree of fixed size whose shape the drafter chooses, grown inside a static graph (EAGLE-2 and 3).

Growth: the k best tokens of the root are the first level; of every level the k best nodes by cumulative
log-probability are expanded by k tokens each. Rerank: the M best of all nodes stay (Li et al., 2024, arXiv
2406.16858). A node is never better than its parent, so the parents of those that stay, stay.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from draftwood.compiler.drafters.common.fixed_tree import Growth
from draftwood.compiler.steps.step import tensor
from draftwood.manifest import TensorSignature
from draftwood.trees.spec import Budget

# k candidates, A = k + (D - 1) * k * k nodes grown, M kept, T = M + 1 rows, L = D + 1 places on a path

# A token of probability 1 ties with its parent. Taking this from the log-probability for every level keeps the
# parent ahead; it is more than fp32 loses at any score above -1000.
LEVEL_COST = 1e-4


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

    level_cost_A: Tensor

    def __init__(self, nodes: int, depth: int, candidates: int) -> None:
        super().__init__()
        Budget(nodes, depth, candidates)  # refuses sizes that no tree has
        self.nodes, self.depth, self.candidates = nodes, depth, candidates
        sizes = torch.tensor([candidates] + [candidates**2] * (depth - 1))
        cost_A = torch.arange(depth).repeat_interleave(sizes) * LEVEL_COST
        self.register_buffer("level_cost_A", cost_A, persistent=False)

    def outputs(self) -> list[TensorSignature]:
        """What ``grow`` gives, as a step declares it."""
        nodes, rows = self.nodes, self.nodes + 1
        return [
            tensor("drafted", "int64", nodes),
            tensor("parents", "int64", rows),
            tensor("depths", "int64", rows),
            tensor("mask", "bool", rows, rows),
            tensor("paths", "int64", rows, self.depth + 1),
            tensor("scores", "float32", nodes),
        ]

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
        kept_M = (scores_A - self.level_cost_A).topk(self.nodes).indices.sort().values
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
        climb_LT = torch.stack(climb)
        depths_T = (climb_LT != 0).sum(0)
        steps_LT = (depths_T - torch.arange(self.depth + 1, device=parents_T.device)[:, None]).clamp(min=0)
        return depths_T, climb_LT.gather(0, steps_LT).transpose(0, 1).contiguous()
