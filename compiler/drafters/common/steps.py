"""The steps of drafters with caches: the modules that are traced, and their signatures, the drafter's caches last.

A step extends the caches, ranks the levels of one pass (`LevelStep`), or grows one tree (`TreeStep`).

All take the same inputs:

* ``features`` [P, F]: the teacher's states, low layer first, of the tokens that the caches do not hold yet;
* ``tokens`` int64 [P]: the tokens that follow those; in a draft step the last is the root;
* ``committed`` int64 [1]: the text's length up to there;
* ``accepted`` int64 [1]: the number of the P rows that count. The rows after them are padding: any numbers and ids.

A draft step also takes ``noise`` [D, U], a row for every level.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn

from draftwood.compiler.drafters.common.layers import CachedNetwork, Extended, Waiting
from draftwood.compiler.drafters.common.ranked import ranked_outputs
from draftwood.compiler.drafters.common.trees import BudgetTree, FixedTree
from draftwood.compiler.steps.step import Step, cached, tensor
from draftwood.compiler.teachers.block import Form
from draftwood.compiler.teachers.decoder import Decoder, TeacherEnds
from draftwood.manifest import GraphKind, TensorSignature, draft_cache_names

# P rows that extend the cache, F features, D levels, U draft vocabulary, I levels of one pass, K candidates,
# M nodes of a tree

# A CPU's draft and extend graphs take any KV length and any number of rows. As examples: distinct and above 1, so that
# torch.export ties no two sizes and specialises none.
_EXAMPLE_SLOTS, _EXAMPLE_ROWS = 192, 5


class CachedStep(nn.Module):
    """Holds the drafter, and those of the teacher's matrices that it reads."""

    def __init__(self, drafter: CachedNetwork, decoder: Decoder, form: Form) -> None:
        super().__init__()
        self.drafter, self.form = drafter, form
        self.teacher = TeacherEnds(decoder, not drafter.config.own_embedding, not drafter.config.has_head)

    def extended(
        self, tokens: Tensor, features: Tensor, committed: Tensor, accepted: Tensor, caches: Sequence[Tensor]
    ) -> Extended:
        """The result of the network's ``extend``."""
        waiting = Waiting(tokens, features, committed, accepted)
        return self.drafter.extend(waiting, list(caches), self.teacher, self.form)


class ExtendStep(CachedStep):
    """Writes P rows into the caches and drafts nothing; out come the last row's hidden states, then the caches.

    Nobody needs the hidden states, but a device writes a cache in place only if something reads the written value.
    """

    def forward(self, tokens, features, committed, accepted, *caches):  # type: ignore[no-untyped-def]
        written = self.extended(tokens, features, committed, accepted, caches)
        return (written.normed, *written.caches)


class LevelStep(CachedStep):
    """Candidates int64 [I, K] and scores float32 [I, K] as Medusa's, then the caches."""

    def __init__(self, drafter: CachedNetwork, decoder: Decoder, candidates: int, form: Form = "fused") -> None:
        super().__init__(drafter, decoder, form)
        self.candidates = candidates

    def forward(self, tokens, features, committed, accepted, noise, *caches):  # type: ignore[no-untyped-def]
        extended = self.extended(tokens, features, committed, accepted, caches)
        levels_IH = self.drafter.levels(extended, self.teacher)
        return (*self.drafter.best(levels_IH, self.teacher, self.candidates, noise), *extended.caches)


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


class NewRows(NamedTuple):
    """The rows that extend the caches in a step, at a KV length and in an element type; 0 and 0 mean any, on a CPU."""

    rows: int
    slots: int
    dtype: str = "float32"

    @property
    def form(self) -> Form:
        """The form of attention."""
        return "fused" if self.slots else "cpu"


def extend_step(drafter: CachedNetwork, decoder: Decoder, new_rows: NewRows) -> Step:
    """Extends the caches by rows."""
    rows, slots, dtype = new_rows
    name = f"extend-t{rows}-kv{slots}" if slots else "extend"
    outputs = [tensor("hidden", dtype, drafter.root_states, drafter.config.block.hidden)]
    return _cached_step(ExtendStep(drafter, decoder, new_rows.form), name, "extend", outputs, new_rows)


def level_step(drafter: CachedNetwork, decoder: Decoder, levels: int, candidates: int, new_rows: NewRows) -> Step:
    """The draft step of one pass, after an extension by rows."""
    module = LevelStep(drafter, decoder, candidates, new_rows.form)
    outputs = ranked_outputs(levels, candidates, "float32")
    return _cached_step(module, _at("draft", new_rows.slots), "draft", outputs, new_rows, levels)


def tree_step(
    drafter: CachedNetwork, decoder: Decoder, name: str, tree: FixedTree | BudgetTree, new_rows: NewRows
) -> Step:
    """The draft step for one tree, after an extension by rows."""
    module = TreeStep(drafter, decoder, tree, new_rows.form)
    return _cached_step(module, _at(name, new_rows.slots), "draft", tree.outputs(), new_rows, tree.depth)


def _at(name: str, slots: int) -> str:
    return f"{name}-kv{slots}" if slots else name


def _cached_step(
    module: CachedStep, name: str, kind: GraphKind, outputs: list[TensorSignature], new_rows: NewRows, levels: int = 0
) -> Step:
    """The step of a module. Its signature is made of the inputs that all steps with caches take; one that drafts has
    levels."""
    config, (rows, slots, dtype) = module.drafter.config, new_rows
    block, count = config.block, rows or "N"
    inputs = [
        tensor("tokens", "int64", count),
        tensor("features", dtype, count, config.features),
        tensor("committed", "int64", 1),
        tensor("accepted", "int64", 1),
        *([tensor("noise", dtype, levels, config.draft_vocabulary)] if levels else []),
    ]
    shape = (block.kv_heads * slots, block.head_dim) if slots else (1, block.kv_heads, "C", block.head_dim)
    signature = cached(draft_cache_names(block.layers), name, kind, inputs, outputs, shape, rows, slots, dtype)
    sizes = ({"N": _EXAMPLE_ROWS} if not rows else {}) | ({"C": _EXAMPLE_SLOTS} if not slots else {})
    return Step(module, signature, sizes)
