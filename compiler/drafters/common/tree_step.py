"""The draft step of drafters whose candidates depend on the nodes above: an extend pass, then one tree."""

from __future__ import annotations

from draftwood.compiler.drafters.common.budget_tree import BudgetTree
from draftwood.compiler.drafters.common.fixed_tree import FixedTree
from draftwood.compiler.drafters.common.layers import CachedNetwork
from draftwood.compiler.drafters.common.steps import CachedStep, draft_step, form_at
from draftwood.compiler.steps.step import Step
from draftwood.compiler.teachers.block import Form
from draftwood.compiler.teachers.decoder import Decoder
from draftwood.trees import Topology
from draftwood.trees.spec import Budget

# M draft nodes, T = M + 1


class TreeStep(CachedStep):
    """A draft tree of M nodes; the caches come last.

    A fixed tree gives tokens int64 [M] of rows 1 to M and scores float32 [M]; a budget tree gives the six
    outputs of ``BudgetDraft``.
    """

    def __init__(
        self, drafter: CachedNetwork, decoder: Decoder, tree: FixedTree | BudgetTree, form: Form = "fused"
    ) -> None:
        super().__init__(drafter, decoder, form)
        self.tree = tree

    def forward(self, tokens, features, committed, accepted, noise, *caches):  # type: ignore[no-untyped-def]
        written = self.extended(tokens, features, committed, accepted, caches)
        return (*self.tree.grow(self.drafter.root(written, self.teacher, noise)), *written.caches)


def grown(tree: Topology | Budget) -> FixedTree | BudgetTree:
    """What grows a tree of at least one node."""
    return BudgetTree(tree.nodes, tree.depth, tree.width) if isinstance(tree, Budget) else FixedTree(tree)


def tree_step(
    drafter: CachedNetwork,
    decoder: Decoder,
    name: str,
    tree: FixedTree | BudgetTree,
    rows: int,
    slots: int,
    dtype: str = "float32",
) -> Step:
    """The draft step for one tree behind ``rows`` rows at KV length ``slots``; 0 and 0 mean any."""
    module = TreeStep(drafter, decoder, tree, form_at(slots))
    return draft_step(module, name, tree.depth, tree.outputs(), rows, slots, dtype)
