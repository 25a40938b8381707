"""The rows that a verify step takes, made of a draft step's outputs, inside a graph.

On the host `draftwood.runtime.speculation.drafting` does the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from draftwood.trees import Topology, tensorize

# T rows, M = T - 1 draft nodes, I levels, K candidates


class TreeRows(NamedTuple):
    """A tree to verify: the rows' tokens, parents and depths int64 [T], and the rows that each sees, bool [T, T]."""

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    visible: Tensor


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
    """A tree of a fixed shape. If levels are ranked, ``candidates`` a level, a node's token stands at its depth and
    rank."""

    parents_T: Tensor
    depths_T: Tensor
    visible_TT: Tensor
    place_M: Tensor

    def __init__(self, tree: Topology, candidates: int) -> None:
        super().__init__()
        buffers, self.ranked = tensorize(tree), bool(candidates)
        tables = {
            "parents_T": buffers.parents,
            "depths_T": buffers.depths,
            "visible_TT": buffers.mask,
            "place_M": (buffers.depths[1:] - 1) * candidates + buffers.ranks[1:],
        }
        for name, table in tables.items():
            self.register_buffer(name, torch.from_numpy(table.copy()), persistent=False)

    def forward(self, root_1: Tensor, drafted: Mapping[str, Tensor]) -> TreeRows:
        nodes_M = drafted["candidates"].flatten().index_select(0, self.place_M) if self.ranked else drafted["drafted"]
        return TreeRows(torch.cat((root_1, nodes_M)), self.parents_T, self.depths_T, self.visible_TT)
