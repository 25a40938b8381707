"""Which steps a bundle has: the teacher's and the drafter's, for its trees at its KV lengths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

from torch import nn

from draftwood import manifest as m
from draftwood.compiler.drafters.model import ANY_LENGTH, DraftModel, Lengths, Modules
from draftwood.compiler.drafters.registry import drafter_of
from draftwood.compiler.steps.accept import Draws, accept_name, accept_step
from draftwood.compiler.steps.prefill import prefill_step
from draftwood.compiler.steps.step import Step, StepSizes
from draftwood.compiler.steps.texts import accept_texts_step, verify_texts_step
from draftwood.compiler.steps.tree_rows import BudgetRows, FixedRows
from draftwood.compiler.steps.verify import verify_step
from draftwood.compiler.steps.whole import WholeParts, whole_step
from draftwood.compiler.teachers.block import Form
from draftwood.compiler.teachers.decoder import Decoder
from draftwood.planned import Gear
from draftwood.trees import Topology
from draftwood.trees.spec import Budget, Lookup


@dataclass(frozen=True, slots=True)
class Shapes:
    """The shapes that steps are made for: named trees, KV lengths ascending, prefill chunks, and gears. ``bitwise``
    adds the step whose rows have the same bits in every tree, if the target has one."""

    trees: tuple[tuple[str, Topology | Budget], ...]
    slots: tuple[int, ...]
    prefill_rows: tuple[int, ...]
    gears: tuple[Gear, ...]
    bitwise: bool = False
    # Also a graph for the whole step of a gear, if the target has such graphs.
    whole: bool = False
    # The most texts of one launch, if the target has graphs for several.
    texts: int = 1

    @property
    def drafted(self) -> tuple[tuple[str, Topology | Budget], ...]:
        """The trees but those that are looked up in the text."""
        return tuple((name, tree) for name, tree in self.trees if not isinstance(tree, Lookup))

    @property
    def batches(self) -> tuple[int, ...]:
        """Numbers of texts with a graph, besides one: the gears' numbers, or powers of two up to the most."""
        planned = {texts for gear in self.gears for texts in gear.texts}
        return tuple(sorted({*planned, *(1 << i for i in range(1, self.texts.bit_length())), self.texts} - {1}))

    def sizes(self, dtype: str = "float32", least_rows: int = 1) -> StepSizes:
        """The sizes of every static step, as the largest tree needs them, in an element type."""
        rows, depths = zip(*((tree.rows, tree.depth) for _, tree in self.trees), strict=True)
        return StepSizes(branch_rows=max(least_rows, *rows), path_rows=max(depths) + 1, dtype=dtype)


def static_steps(
    shapes: Shapes, sizes: StepSizes, decoder: Decoder, decode_rows: int = 1, form: Form = "fused"
) -> list[Step]:
    """The teacher's steps of every gear, as an accelerator runs them; plain decoding is padded to ``decode_rows``."""
    rows_of = {name: tree.rows for name, tree in shapes.trees}
    steps = []
    for slots in shapes.slots:
        steps += [prefill_step(decoder, sizes, r, slots, form) for r in shapes.prefill_rows if r < slots]
        steps.append(verify_step(decoder, sizes, decode_rows, slots, form, decode=True))
        rows = {rows_of[gear.tree] for gear in shapes.gears if gear.slots == slots}
        steps += [verify_step(decoder, sizes, r, slots, form, decode=False) for r in sorted(rows - {1})]
    return steps


def accept_steps(
    shapes: Shapes, sizes: StepSizes, decoder: Decoder, drafter: DraftModel | None, decode_rows: int = 1
) -> list[Step]:
    """Acceptance, greedy and sampled, for every number of rows that the static steps verify."""
    rows_of = {name: tree.rows for name, tree in shapes.trees}
    rows = {decode_rows, *(rows_of[gear.tree] for gear in shapes.gears)} - ({1} if decode_rows > 1 else set())
    features = decoder.feature_width if drafter else 0
    rows_read = drafter.rows_read(sizes.path_rows) if drafter else 0
    vocabulary = decoder.config.vocabulary
    draws: tuple[Draws, ...] = ("greedy", "sampled")
    return [accept_step(d, r, sizes, vocabulary, features, rows_read) for r in sorted(rows) for d in draws]


def texts_steps(
    shapes: Shapes, sizes: StepSizes, decoder: Decoder, drafter: DraftModel | None, decode_rows: int
) -> list[Step]:
    """The static steps of several texts: verification and acceptance. Verification is for every KV length, and for the
    rows of each gear there and of a plain step."""
    rows_of = {name: tree.rows for name, tree in shapes.trees}
    rows = {s: {decode_rows} | {rows_of[g.tree] for g in shapes.gears if g.slots == s} - {1} for s in shapes.slots}
    features, rows_read = (decoder.feature_width, drafter.rows_read(sizes.path_rows)) if drafter else (0, 0)
    vocabulary, steps = decoder.config.vocabulary, list[Step]()
    for texts in shapes.batches:
        steps += [
            verify_texts_step(decoder, sizes, texts, r, slots) for slots in shapes.slots for r in sorted(rows[slots])
        ]
        steps += [
            accept_texts_step(draws, sizes, texts, r, vocabulary, features, rows_read)
            for r in sorted(set().union(*rows.values()))
            for draws in get_args(Draws)
        ]
    return steps


def draft_steps(
    shapes: Shapes, sizes: StepSizes, drafter: DraftModel | None, modules: Modules, static: bool
) -> list[Step]:
    """The drafter's steps: ``static`` ones at every KV length, as an accelerator runs them, or ones for any."""
    if drafter is None or modules[1] is None:
        return []
    lengths = Lengths(shapes.slots, shapes.prefill_rows) if static else ANY_LENGTH
    return drafter.steps(modules, shapes.drafted, sizes, lengths)


def whole_steps(
    shapes: Shapes, sizes: StepSizes, drafter: DraftModel | None, modules: Modules, decode_rows: int
) -> list[Step]:
    """Steps that do a whole gear in one launch, greedy and sampled, from the static steps of the same shapes."""
    drafts = {step.signature.name: step for step in draft_steps(shapes, sizes, drafter, modules, static=True)}
    trees, decoder = dict(shapes.trees), modules[0]
    steps = static_steps(shapes, sizes, decoder, decode_rows, "npu")
    accepts = {s.signature.name: s for s in accept_steps(shapes, sizes, decoder, drafter, decode_rows)}
    whole = []
    for gear in shapes.gears:
        tree = trees[gear.tree]
        if isinstance(tree, Lookup):  # the host drafts
            continue
        draft = _draft_of(gear, drafts, drafter) if tree.rows > 1 else None
        kind, rows = ("verify", tree.rows) if tree.rows > 1 else ("decode", decode_rows)
        verify = next(
            s for s in steps if (s.signature.kind, s.signature.slots) == (kind, gear.slots) and s.signature.rows == rows
        )
        tree_rows = _rows(tree, draft, rows, sizes.path_rows)
        for draws in get_args(Draws):
            parts = WholeParts(draft, tree_rows, verify, accepts[accept_name(draws, rows)])
            whole.append(whole_step(gear.name, draws, parts, decoder.config.vocabulary))
    return whole


def _draft_of(gear: Gear, drafts: Mapping[str, Step], drafter: DraftModel | None) -> Step:
    assert drafter is not None, "a tree is drafted"
    name = drafter.draft_name(gear.tree)
    return drafts.get(f"{name}-kv{gear.slots}") or drafts[name]


def _rows(tree: Topology | Budget, draft: Step | None, rows: int, places: int) -> nn.Module:
    """The module that turns a gear's draft into rows."""
    if not isinstance(tree, Topology):
        return BudgetRows(places)
    outputs = draft.signature.outputs if draft else ()
    ranked = next((spec for spec in outputs if spec.name == "candidates"), None)
    return FixedRows(tree, rows, places, int(ranked.shape[1]) if ranked else 0)


def rebuild_drafts(
    manifest: m.Manifest, graphs: m.GraphSet, topologies: Mapping[str, Topology], modules: Modules
) -> dict[str, Step]:
    """The drafter's steps of a bundle's graph set by name, on modules that hold its weights."""
    if manifest.drafter is None or modules[1] is None:
        return {}
    drafter, dims = drafter_of(manifest.drafter), manifest.dims
    trees = [(name, tree) for name, tree in manifest_trees(manifest, topologies) if not isinstance(tree, Lookup)]
    dtype = graphs.precision.activations
    sizes = StepSizes(branch_rows=dims.branch_rows, path_rows=dims.path_rows, dtype=dtype)
    extends = [graph for graph in graphs.graphs if graph.kind == "extend"]
    slots, chunks = (tuple(sorted({getattr(graph, of) for graph in extends} - {0})) for of in ("slots", "rows"))
    lengths = [ANY_LENGTH] * any(not graph.slots for graph in extends) + [Lengths(slots, chunks)]
    steps = [step for length in lengths for step in drafter.steps(modules, trees, sizes, length)]
    return {step.signature.name: step for step in steps}


def rebuild_wholes(
    manifest: m.Manifest, graphs: m.GraphSet, topologies: Mapping[str, Topology], modules: Modules
) -> dict[str, Step]:
    """The whole steps of a bundle's graph set by name, if it has any, on modules that hold its weights."""
    if not any(graph.kind == "whole" for graph in graphs.graphs):
        return {}
    decode = next(graph for graph in graphs.graphs if graph.kind == "decode")
    branch = next(int(spec.shape[2]) for spec in decode.inputs if spec.name == "branch")
    sizes = StepSizes(branch_rows=branch, path_rows=manifest.dims.path_rows, dtype=graphs.precision.activations)
    slots = tuple(sorted({gear.slots for gear in manifest.gears}))
    shapes = Shapes(manifest_trees(manifest, topologies), slots, (), manifest.gears)
    drafter = drafter_of(manifest.drafter) if manifest.drafter else None
    steps = whole_steps(shapes, sizes, drafter, modules, decode.rows)
    return {step.signature.name: step for step in steps}


def manifest_trees(
    manifest: m.Manifest, topologies: Mapping[str, Topology]
) -> tuple[tuple[str, Topology | Budget], ...]:
    """The trees of a bundle by name; ``topologies`` are the trees with a file."""
    looked_up = {gear.tree for gear in manifest.gears if gear.looks_up}

    def shape(tree: m.Tree) -> Topology | Budget:
        if not tree.file:
            return Budget(tree.rows - 1, tree.depth, tree.width)
        topology = topologies[tree.name]
        return Lookup(topology.parents, topology.ranks) if tree.name in looked_up else topology

    return tuple((tree.name, shape(tree)) for tree in manifest.trees)
