"""The drafters' steps: the modules that are traced, and their signatures, the drafter's caches last.

Medusa's takes ``features`` [1, H] alone, the teacher's last hidden state. The others all take the same inputs:
``features`` [P, F], the teacher's three states, low layer first, of tokens of the text that the caches do not hold
yet; ``tokens`` int64 [P], the tokens after those, in a draft step the root last; ``committed`` int64 [1], the text's
length up to there, and ``accepted`` int64 [1], how many of the P rows count. The rows behind are padding: any numbers
and ids.
"""

from __future__ import annotations

from torch import Tensor, nn

from draftwood.compiler.drafters.common.layers import TeacherWeights, Waiting
from draftwood.compiler.drafters.eagle3.budget_tree import BudgetTree
from draftwood.compiler.drafters.eagle3.fixed_tree import FixedTree
from draftwood.compiler.drafters.eagle3.network import Eagle3
from draftwood.compiler.drafters.fasteagle.network import FastEagle
from draftwood.compiler.drafters.medusa.network import MedusaHeads
from draftwood.compiler.steps.step import Step, cached, tensor
from draftwood.compiler.teachers.block import Form
from draftwood.compiler.teachers.decoder import Decoder
from draftwood.manifest import GraphKind, GraphSignature, TensorSignature, draft_cache_names

# P rows that extend the cache, F features, M draft nodes, T = M + 1, I levels, K candidates

# A CPU's draft and extend graphs take any KV length and any number of rows. As examples: distinct and above 1, so that
# torch.export ties no two sizes and specialises none.
_EXAMPLE_SLOTS, _EXAMPLE_ROWS = 192, 5


class MedusaStep(nn.Module):
    """One hidden state in, candidates of every level out."""

    def __init__(self, heads: MedusaHeads, decoder: Decoder, candidates: int) -> None:
        super().__init__()
        self.drafter, self.candidates, self.tied_to_embedding = heads, candidates, decoder.config.tied
        if heads.tied:
            self.lm_head = decoder.head_weight

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        return self.drafter(features, self.lm_head if self.drafter.tied else None, self.candidates)


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

    def extended(self, tokens, features, committed, accepted, caches):  # type: ignore[no-untyped-def]
        waiting = Waiting(tokens, features, committed, accepted)
        return self.drafter.extend(waiting, list(caches), self.teacher, self.form)


class ExtendStep(_DrafterStep):
    """Writes P rows into the caches and drafts nothing; out come the last row's hidden states, then the caches.

    Nobody needs the hidden states, but a device writes a cache in place only if something reads what was written.
    """

    def forward(self, tokens, features, committed, accepted, *caches):  # type: ignore[no-untyped-def]
        written = self.extended(tokens, features, committed, accepted, caches)
        return (written.normed, *written.caches)


class TreeStep(_DrafterStep):
    """EAGLE-3 over a draft tree of M nodes; the caches come last.

    A fixed tree gives tokens int64 [M] of rows 1 to M and scores float32 [M]; a budget tree gives the six
    outputs of ``BudgetDraft``.
    """

    drafter: Eagle3

    def __init__(self, drafter: Eagle3, decoder: Decoder, tree: FixedTree | BudgetTree, form: Form = "fused") -> None:
        super().__init__(drafter, decoder, form)
        self.tree = tree

    def forward(self, tokens, features, committed, accepted, *caches):  # type: ignore[no-untyped-def]
        written = self.extended(tokens, features, committed, accepted, caches)
        return (*self.tree.grow(self.drafter, written, self.teacher), *written.caches)


class FastEagleStep(_DrafterStep):
    """FastEagle: candidates int64 [I, K] and scores float32 [I, K] as Medusa's, then the caches."""

    drafter: FastEagle

    def __init__(self, drafter: FastEagle, decoder: Decoder, candidates: int, form: Form = "fused") -> None:
        super().__init__(drafter, decoder, form)
        self.candidates = candidates

    def forward(self, tokens, features, committed, accepted, *caches):  # type: ignore[no-untyped-def]
        cascade = self.extended(tokens, features, committed, accepted, caches)
        return (*self.drafter.best(cascade.normed_IH, self.teacher, self.candidates), *cascade.caches)


def medusa_step(heads: MedusaHeads, decoder: Decoder, candidates: int, dtype: str = "float32") -> Step:
    """The draft step of Medusa heads."""
    signature = GraphSignature(
        name="draft",
        kind="draft",
        file="onnx/draft.onnx",
        rows=1,
        slots=0,
        inputs=(tensor("features", dtype, 1, decoder.feature_width),),
        outputs=tuple(_ranked(len(heads.heads), candidates, dtype)),
        aliases={},
    )
    return Step(MedusaStep(heads, decoder, candidates), signature)


def extend_step(drafter: Eagle3 | FastEagle, decoder: Decoder, rows: int, slots: int, dtype: str = "float32") -> Step:
    """Extends the caches by ``rows`` rows at KV length ``slots``; 0 and 0 mean any, the graph of a CPU."""
    block = drafter.config.block
    name = f"extend-t{rows}-kv{slots}" if slots else "extend"
    levels = block.layers if isinstance(drafter, FastEagle) else 1
    outputs = [tensor("hidden", dtype, levels, block.hidden)]
    return _step(ExtendStep(drafter, decoder, _form(slots)), name, "extend", outputs, rows, slots, dtype)


def fasteagle_step(
    drafter: FastEagle, decoder: Decoder, candidates: int, rows: int, slots: int, dtype: str = "float32"
) -> Step:
    """FastEagle's draft step behind ``rows`` rows at KV length ``slots``; 0 and 0 mean any."""
    outputs = _ranked(drafter.config.block.layers, candidates, "float32")
    module = FastEagleStep(drafter, decoder, candidates, _form(slots))
    return _step(module, _draft_name("draft", slots), "draft", outputs, rows, slots, dtype)


def tree_step(
    drafter: Eagle3,
    decoder: Decoder,
    name: str,
    tree: FixedTree | BudgetTree,
    rows: int,
    slots: int,
    dtype: str = "float32",
) -> Step:
    """EAGLE-3's draft step for one tree behind ``rows`` rows at KV length ``slots``; 0 and 0 mean any."""
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
    module = TreeStep(drafter, decoder, tree, _form(slots))
    return _step(module, _draft_name(name, slots), "draft", outputs, rows, slots, dtype)


def _draft_name(name: str, slots: int) -> str:
    return f"{name}-kv{slots}" if slots else name


def _form(slots: int) -> Form:
    return "fused" if slots else "cpu"


def _ranked(levels: int, candidates: int, dtype: str) -> list[TensorSignature]:
    return [tensor("candidates", "int64", levels, candidates), tensor("scores", dtype, levels, candidates)]


def _step(
    module: _DrafterStep,
    name: str,
    kind: GraphKind,
    outputs: list[TensorSignature],
    rows: int,
    slots: int,
    dtype: str,
) -> Step:
    config = module.drafter.config
    block, count = config.block, rows or "N"
    inputs = [
        tensor("tokens", "int64", count),
        tensor("features", dtype, count, len(config.aux_layers) * config.target_hidden),
        tensor("committed", "int64", 1),
        tensor("accepted", "int64", 1),
    ]
    shape = (block.kv_heads * slots, block.head_dim) if slots else (1, block.kv_heads, "C", block.head_dim)
    signature = cached(draft_cache_names(block.layers), name, kind, inputs, outputs, shape, rows, slots, dtype)
    sizes = ({"N": _EXAMPLE_ROWS} if not rows else {}) | ({"C": _EXAMPLE_SLOTS} if not slots else {})
    return Step(module, signature, sizes)
