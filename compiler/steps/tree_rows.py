"""The rows that a verify step takes, made of a draft step's outputs, inside a graph.

On the host `draftwood.runtime.speculation.drafting` does the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from draftwood.trees import Topology, tensorize, walk_tables
from draftwood.trees.acceptance import LAPSE

# T rows, M = T - 1 draft nodes, I levels, K candidates, L places of a path of the tree, P of any


class TreeRows(NamedTuple):
    """A tree to verify: the rows' tokens, depths and parents int64 [T], and the rows that each sees, bool [T, T]; the
    others are `draftwood.trees.acceptance.WalkTables`."""

    tokens: Tensor
    depths: Tensor
    parents: Tensor
    visible: Tensor
    demands: Tensor
    start: Tensor
    paths: Tensor


class BudgetRows(nn.Module):
    """The tree that the drafter has chosen."""

    def __init__(self, places: int) -> None:
        super().__init__()
        self.places = places

    def forward(self, root_1: Tensor, drafted: Mapping[str, Tensor]) -> TreeRows:
        depths_T, parents_T, visible_TT = (drafted[name] for name in ("depths", "parents", "mask"))
        order_T, paths_TL = torch.arange(len(parents_T), device=root_1.device), drafted["paths"]
        siblings_TT = parents_T[:, None] == parents_T
        older_TT = (siblings_TT & ((order_T < order_T[:, None]) & (order_T > 0))).float()
        needed_TT = (visible_TT & (order_T > 0)).float()
        demands_TT = (needed_TT - needed_TT @ older_TT) * LAPSE
        start_T = depths_T.float() - needed_TT.sum(1) * LAPSE
        missing = self.places - paths_TL.shape[1]
        paths_TP = torch.cat((paths_TL, paths_TL[:, -1:].expand(-1, missing)), 1) if missing else paths_TL
        tokens_T = torch.cat((root_1, drafted["drafted"]))
        return TreeRows(tokens_T, depths_T, parents_T, visible_TT, demands_TT, start_T, paths_TP)


class FixedRows(nn.Module):
    """A tree of a fixed shape on so many rows. If levels are ranked, ``candidates`` a level, a node's token stands at
    its depth and rank. Rows that are padding repeat the root's token, and see themselves."""

    place_M: Tensor

    def __init__(self, tree: Topology, rows: int, places: int, candidates: int) -> None:
        super().__init__()
        buffers, self.ranked, self.nodes = tensorize(tree), bool(candidates), tree.nodes
        self.padding = rows - tree.rows
        visible_TT, padding = np.eye(rows, dtype=np.bool_), (0, self.padding)
        visible_TT[: tree.rows, : tree.rows] = buffers.mask
        walked = walk_tables(buffers, rows, places)
        tables = {
            "depths_T": np.pad(buffers.depths, padding),
            "parents_T": np.pad(buffers.parents, padding),
            "visible_TT": visible_TT,
            **walked._asdict(),
        }
        self.names = tuple(tables)
        tables["place_M"] = (buffers.depths[1:] - 1) * candidates + buffers.ranks[1:]
        for name, table in tables.items():
            self.register_buffer(name, torch.from_numpy(table.copy()), persistent=False)

    def forward(self, root_1: Tensor, drafted: Mapping[str, Tensor]) -> TreeRows:
        tokens = [root_1]
        if self.nodes and self.ranked:
            tokens.append(drafted["candidates"].flatten().index_select(0, self.place_M))
        elif self.nodes:
            tokens.append(drafted["drafted"])
        tokens += [root_1] * self.padding
        return TreeRows(torch.cat(tokens), *(getattr(self, name) for name in self.names))
