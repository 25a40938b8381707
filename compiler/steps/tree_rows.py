"""The rows that a verify step takes, made of a draft step's outputs, inside a graph.

On the host `draftwood.runtime.speculation.drafting` does the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from draftwood.trees import Topology, TreeBuffers, tensorize

# T rows, M = T - 1 draft nodes, C confidence classes, I levels, K candidates


class TreeRows(NamedTuple):
    """A tree to verify: the rows' tokens, parents and depths int64 [T], and the rows that each sees, bool [T, T].

    ``chosen`` int64 [1] is the confidence class whose tree it is, if there are several.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    visible: Tensor
    chosen: Tensor | None = None


class PlainRows(nn.Module):
    """The root alone; as an accelerator wants it, on several rows that do not see each other."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = rows

    def forward(self, root_1: Tensor, drafted: Mapping[str, Tensor]) -> TreeRows:
        tokens_T = root_1.repeat(self.rows)
        order_T = torch.arange(self.rows, device=root_1.device)
        nothing_T = torch.zeros_like(order_T)
        return TreeRows(tokens_T, nothing_T, nothing_T, order_T[:, None] == order_T)


class BudgetRows(nn.Module):
    """The tree that the drafter has chosen."""

    def forward(self, root_1: Tensor, drafted: Mapping[str, Tensor]) -> TreeRows:
        tokens_T = torch.cat((root_1, drafted["drafted"]))
        return TreeRows(tokens_T, drafted["parents"], drafted["depths"], drafted["mask"])


class FixedRows(nn.Module):
    """One of the trees of equally many rows that a gear has, by the confidence that their ``bounds`` divide.

    If levels are ranked, ``candidates`` a level, a node's token stands at its depth and rank.
    """

    parents_CT: Tensor
    depths_CT: Tensor
    visible_CTT: Tensor
    place_CM: Tensor
    bounds_C: Tensor

    def __init__(self, trees: Sequence[Topology], bounds: Sequence[float], candidates: int) -> None:
        super().__init__()
        buffers, self.ranked = [tensorize(tree) for tree in trees], bool(candidates)
        tables = {
            "parents_CT": _stacked(buffers, lambda tree: tree.parents),
            "depths_CT": _stacked(buffers, lambda tree: tree.depths),
            "visible_CTT": _stacked(buffers, lambda tree: tree.mask),
            "place_CM": _stacked(buffers, lambda tree: (tree.depths[1:] - 1) * candidates + tree.ranks[1:]),
            "bounds_C": torch.tensor(bounds, dtype=torch.float32),
        }
        for name, table in tables.items():
            self.register_buffer(name, table, persistent=False)

    def forward(self, root_1: Tensor, drafted: Mapping[str, Tensor]) -> TreeRows:
        chosen = self._class(drafted["scores"]) if len(self.bounds_C) else None
        parents, depths, visible, place_M = (
            table.index_select(0, chosen).squeeze(0) if chosen is not None else table.squeeze(0)
            for table in (self.parents_CT, self.depths_CT, self.visible_CTT, self.place_CM)
        )
        nodes_M = drafted["candidates"].flatten().index_select(0, place_M) if self.ranked else drafted["drafted"]
        return TreeRows(torch.cat((root_1, nodes_M)), parents, depths, visible, chosen)

    def _class(self, scores: Tensor) -> Tensor:
        """The place of the best first candidate's probability among the bounds, int64 [1]."""
        best_1 = scores.flatten()[:1].float().clamp(max=0.0)
        return (best_1.exp() >= self.bounds_C).sum(0, keepdim=True)


def _stacked(trees: Sequence[TreeBuffers], table: Callable[[TreeBuffers], NDArray]) -> Tensor:
    return torch.from_numpy(np.stack([table(tree) for tree in trees]))
