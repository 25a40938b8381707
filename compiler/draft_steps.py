"""The modules that are traced for EAGLE-3 and FastEagle: positional inputs, the drafter's caches last.

Inputs of a draft step: ``tokens`` int64 [P], the accepted tokens after the first, then the root; ``features``
[B, F], the teacher's three states of the last verify step's rows, low layer first; ``path`` int64 [P], the
accepted rows; ``committed`` and ``accepted`` int64 [1], as the teacher's steps have them. Entries past
``accepted`` are padding: any valid row and id.
"""

from __future__ import annotations

from torch import nn

from draftwood.compiler.budget_tree import BudgetTree
from draftwood.compiler.decoder import Decoder, Form
from draftwood.compiler.drafter_layers import TeacherWeights
from draftwood.compiler.eagle3 import Eagle3
from draftwood.compiler.fasteagle import FastEagle
from draftwood.compiler.fixed_tree import FixedTree


class _DrafterStep(nn.Module):
    """Holds the drafter, and those of the teacher's matrices that it reads, as ``embed`` and ``lm_head``."""

    def __init__(self, drafter: Eagle3 | FastEagle, decoder: Decoder, form: Form) -> None:
        super().__init__()
        self.drafter, self.form, self.tied_to_embedding = drafter, form, decoder.config.tied
        self.embed = None if drafter.config.own_embedding else decoder.embed.weight
        self.lm_head = None if drafter.config.has_head else decoder.head_weight

    @property
    def teacher(self) -> TeacherWeights:
        return TeacherWeights(self.embed, self.lm_head)


class ExtendStep(_DrafterStep):
    """A prefill chunk of N rows: ``features`` [N, F] of its tokens, ``tokens`` [N] after them; caches out."""

    def forward(self, tokens, features, committed, accepted, *caches):  # type: ignore[no-untyped-def]
        written = self.drafter.extend(tokens, features, committed, accepted, list(caches), self.teacher, self.form)
        return tuple(written.caches)


class TreeStep(_DrafterStep):
    """EAGLE-3 over a draft tree of M nodes; the caches come last.

    A fixed tree gives tokens int64 [M] of rows 1 to M and scores float32 [M]; a budget tree gives the six
    outputs of ``BudgetDraft``.
    """

    drafter: Eagle3

    def __init__(self, drafter: Eagle3, decoder: Decoder, tree: FixedTree | BudgetTree, form: Form = "fused") -> None:
        super().__init__(drafter, decoder, form)
        self.tree = tree

    def forward(self, tokens, features, path, committed, accepted, *caches):  # type: ignore[no-untyped-def]
        rows = features.index_select(0, path)
        written = self.drafter.extend(tokens, rows, committed, accepted, list(caches), self.teacher, self.form)
        return (*self.tree.grow(self.drafter, written, self.teacher), *written.caches)


class FastEagleStep(_DrafterStep):
    """FastEagle: candidates int64 [I, K] and scores float32 [I, K] as Medusa's, then the caches."""

    def __init__(self, drafter: FastEagle, decoder: Decoder, candidates: int, form: Form = "fused") -> None:
        super().__init__(drafter, decoder, form)
        self.candidates = candidates

    def forward(self, tokens, features, path, committed, accepted, *caches):  # type: ignore[no-untyped-def]
        rows = features.index_select(0, path)
        ids, scores, written = self.drafter(
            tokens, rows, committed, accepted, list(caches), self.teacher, self.candidates, self.form
        )
        return (ids, scores, *written)
