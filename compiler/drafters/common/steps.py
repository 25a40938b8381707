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

from collections.abc import Sequence, Set
from typing import NamedTuple

from torch import Tensor, nn

from draftwood.compiler.drafters.common.layers import CachedNetwork, Extended, Waiting
from draftwood.compiler.drafters.common.trees import BudgetTree, RankTree
from draftwood.compiler.steps.step import Step, signed
from draftwood.compiler.steps.teacher import any_caches, static_caches
from draftwood.compiler.teachers.block import Form
from draftwood.compiler.teachers.decoder import Decoder, TeacherEnds
from draftwood.contract import Sizes
from draftwood.manifest import GraphKind

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
        self, drafter: CachedNetwork, decoder: Decoder, tree: RankTree | BudgetTree, form: Form = "fused"
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
    name = f"extend-t{new_rows.rows}-kv{new_rows.slots}" if new_rows.slots else "extend"
    sizes = {"Q": drafter.root_states, "H": drafter.config.block.hidden}
    return _cached_step(ExtendStep(drafter, decoder, new_rows.form), name, "extend", sizes, new_rows)


def level_step(drafter: CachedNetwork, decoder: Decoder, levels: int, candidates: int, new_rows: NewRows) -> Step:
    """The draft step of one pass, after an extension by rows."""
    module, sizes = LevelStep(drafter, decoder, candidates, new_rows.form), {"D": levels, "K": candidates}
    return _cached_step(module, _at("draft", new_rows.slots), "draft", sizes, new_rows, {"noise", "ranked"})


def tree_step(
    drafter: CachedNetwork, decoder: Decoder, name: str, tree: RankTree | BudgetTree, new_rows: NewRows
) -> Step:
    """The draft step for one tree, after an extension by rows."""
    module, sizes = TreeStep(drafter, decoder, tree, new_rows.form), {**tree.sizes, "D": tree.depth}
    return _cached_step(module, _at(name, new_rows.slots), "draft", sizes, new_rows, {"noise", tree.part})


def _at(name: str, slots: int) -> str:
    return f"{name}-kv{slots}" if slots else name


def _cached_step(
    module: CachedStep, name: str, kind: GraphKind, sizes: Sizes, new_rows: NewRows, parts: Set[str] = frozenset()
) -> Step:
    """The step of a module; its signature is that of a step with caches, with these parts."""
    config, (rows, slots, dtype) = module.drafter.config, new_rows
    signature = signed(
        name,
        kind,
        {**sizes, "N": rows or "N", "W": config.features, "U": config.draft_vocabulary},
        static_caches(config.buffers, slots) if slots else any_caches(config.buffers),
        rows=rows,
        slots=slots,
        dtype=dtype,
        parts=parts | {"cached"},
    )
    examples = ({"N": _EXAMPLE_ROWS} if not rows else {}) | ({"C": _EXAMPLE_SLOTS} if not slots else {})
    return Step(module, signature, examples)
