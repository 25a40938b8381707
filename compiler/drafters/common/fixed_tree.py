"""A draft tree of fixed shape grown inside a static graph: one batched pass a level.

Every drafter whose candidates depend on the nodes above them grows its trees so; what it runs a level is its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from draftwood.compiler.steps.step import tensor
from draftwood.manifest import TensorSignature
from draftwood.trees import Topology, tensorize

# n nodes of a depth, E of them with children, S expanded nodes so far, k candidates, M nodes of the tree


class Growth(Protocol):
    """The rows of one depth that have children, as a drafter has run them; the first are the root alone."""

    def best(self, k: int) -> tuple[Tensor, Tensor]:
        """The k best tokens below every row, best first: the teacher's ids int64 [E, k], log-probabilities [E, k]."""

    def below(self, tokens_E: Tensor, source_E: Tensor, masked_ES: Tensor) -> Growth:
        """The rows of these tokens below those numbered ``source``; ``masked`` hides, of all rows run so far and these
        behind them, the root not counted, those that are not on a row's path."""


class _Level(nn.Module):
    """Index tables of one depth; they are constants of the trace."""

    pick_n: Tensor
    parent_n: Tensor
    expanded_E: Tensor
    source_E: Tensor
    masked_ES: Tensor

    def __init__(self, width: int, tables: dict[str, Tensor]) -> None:
        super().__init__()
        self.width = width
        for name, table in tables.items():
            self.register_buffer(name, table, persistent=False)


class FixedTree(nn.Module):
    """Ranks are those of each parent's own distribution; only rows with children are run."""

    def __init__(self, topology: Topology) -> None:
        super().__init__()
        assert topology.nodes, "a draft tree has at least one node"
        self.nodes, self.depth = topology.nodes, topology.depth
        self.levels = nn.ModuleList(_Level(*_tables(topology, depth)) for depth in range(1, topology.depth + 1))

    def outputs(self) -> list[TensorSignature]:
        """What ``grow`` gives, as a step declares it."""
        return [tensor("drafted", "int64", self.nodes), tensor("scores", "float32", self.nodes)]

    def grow(self, rows: Growth) -> tuple[Tensor, Tensor]:
        """Tokens int64 [M] in the topology's row order, and their cumulative log-probabilities [M], of the root's
        ``rows``."""
        tokens: list[Tensor] = []
        scores: list[Tensor] = []
        for depth, level in enumerate(cast(Iterable[_Level], self.levels), 1):
            ids_Ek, logp_Ek = rows.best(level.width)
            tokens.append(ids_Ek.flatten().index_select(0, level.pick_n))
            gained_n = logp_Ek.flatten().index_select(0, level.pick_n)
            scores.append(scores[-1].index_select(0, level.parent_n) + gained_n if scores else gained_n)
            if depth < len(self.levels):
                rows = rows.below(tokens[-1].index_select(0, level.expanded_E), level.source_E, level.masked_ES)
        return torch.cat(tokens), torch.cat(scores)


def _tables(topology: Topology, depth: int) -> tuple[int, dict[str, Tensor]]:
    """Candidates a parent, and the tables of the nodes at ``depth``.

    ``pick`` reads their tokens from the candidates [E, k] of the depth above, ``parent`` their parents' scores
    among the n of the depth above; ``expanded`` are those with children and ``source`` the rows, among the E
    run before, of their parents. ``masked`` hides from them whatever expanded node is not on their path.
    """
    parents, ranks, depths = topology.parents, topology.ranks, topology.depths
    with_children = set(parents[1:])
    above, here = ([row for row in range(topology.rows) if depths[row] == d] for d in (depth - 1, depth))
    ran = [row for row in above if row in with_children]
    expanded = [row for row in here if row in with_children]
    kept = [row for row in range(1, topology.rows) if row in with_children and depths[row] <= depth]
    width = max(ranks[row] for row in here) + 1
    visible = torch.from_numpy(tensorize(topology).mask.copy())
    return width, {
        "pick_n": torch.tensor([ran.index(parents[row]) * width + ranks[row] for row in here]),
        "parent_n": torch.tensor([above.index(parents[row]) for row in here]),
        "expanded_E": torch.tensor([here.index(row) for row in expanded], dtype=torch.int64),
        "source_E": torch.tensor([ran.index(parents[row]) for row in expanded], dtype=torch.int64),
        "masked_ES": ~visible[expanded][:, kept],
    }
