"""EAGLE-3's draft step: an extend pass, then a pass a level of one tree."""

from __future__ import annotations

from typing import cast

from draftwood.compiler.drafters.common.steps import CachedStep, draft_step, form_at
from draftwood.compiler.drafters.eagle3.budget_tree import BudgetTree
from draftwood.compiler.drafters.eagle3.fixed_tree import FixedTree
from draftwood.compiler.drafters.eagle3.network import Eagle3, Written
from draftwood.compiler.steps.step import Step, tensor
from draftwood.compiler.teachers.block import Form
from draftwood.compiler.teachers.decoder import Decoder

# M draft nodes, T = M + 1


class TreeStep(CachedStep):
    """EAGLE-3 over a draft tree of M nodes; the caches come last.

    A fixed tree gives tokens int64 [M] of rows 1 to M and scores float32 [M]; a budget tree gives the six
    outputs of ``BudgetDraft``.
    """

    drafter: Eagle3

    def __init__(self, drafter: Eagle3, decoder: Decoder, tree: FixedTree | BudgetTree, form: Form = "fused") -> None:
        super().__init__(drafter, decoder, form)
        self.tree = tree

    def forward(self, tokens, features, committed, accepted, noise, *caches):  # type: ignore[no-untyped-def]
        written = cast(Written, self.extended(tokens, features, committed, accepted, caches))
        return (*self.tree.grow(self.drafter, written, self.teacher, noise), *written.caches)


def tree_step(
    drafter: Eagle3,
    decoder: Decoder,
    name: str,
    tree: FixedTree | BudgetTree,
    rows: int,
    slots: int,
    dtype: str = "float32",
) -> Step:
    """The draft step for one tree behind ``rows`` rows at KV length ``slots``; 0 and 0 mean any."""
    nodes = tree.nodes
    outputs = [tensor("drafted", "int64", nodes)]
    if isinstance(tree, BudgetTree):
        outputs += [
            tensor("parents", "int64", nodes + 1),
            tensor("depths", "int64", nodes + 1),
            tensor("mask", "bool", nodes + 1, nodes + 1),
            tensor("paths", "int64", nodes + 1, tree.depth + 1),
        ]
    outputs.append(tensor("scores", "float32", nodes))
    module = TreeStep(drafter, decoder, tree, form_at(slots))
    return draft_step(module, name, tree.depth, outputs, rows, slots, dtype)
