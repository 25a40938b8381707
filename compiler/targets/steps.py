"""Which steps a bundle has: the teacher's and the drafter's, for its trees at its KV lengths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from draftwood import manifest as m
from draftwood.compiler.drafters.model import ANY_LENGTH, DraftModel, Lengths, Modules
from draftwood.compiler.drafters.registry import drafter_of
from draftwood.compiler.steps.accept import Draws, accept_step
from draftwood.compiler.steps.prefill import prefill_step
from draftwood.compiler.steps.step import Step, StepSizes
from draftwood.compiler.steps.verify import verify_step
from draftwood.compiler.teachers.block import Form
from draftwood.compiler.teachers.decoder import Decoder
from draftwood.trees import Topology
from draftwood.trees.spec import Budget, GearSpec


@dataclass(frozen=True, slots=True)
class Shapes:
    """What the steps are made for: named trees, KV lengths ascending, prefill chunks, and gears.

    ``bitwise`` asks for the step whose rows have the same bits in every tree, where a target has it.
    """

    trees: tuple[tuple[str, Topology | Budget], ...]
    slots: tuple[int, ...]
    prefill_rows: tuple[int, ...]
    gears: tuple[GearSpec, ...]
    bitwise: bool = False

    def sizes(self, dtype: str = "float32", least_rows: int = 1) -> StepSizes:
        """What the largest tree asks of every static step, in an element type."""
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
        rows = {rows_of[gear.trees[0]] for gear in shapes.gears if gear.slots == slots}
        steps += [verify_step(decoder, sizes, r, slots, form, decode=False) for r in sorted(rows - {1})]
    return steps


def accept_steps(
    shapes: Shapes, sizes: StepSizes, decoder: Decoder, drafter: DraftModel | None, decode_rows: int = 1
) -> list[Step]:
    """Acceptance for as many rows as the static steps verify, greedy and sampled; it needs no KV length."""
    rows_of = {name: tree.rows for name, tree in shapes.trees}
    rows = {decode_rows, *(rows_of[gear.trees[0]] for gear in shapes.gears)} - ({1} if decode_rows > 1 else set())
    features = decoder.feature_width if drafter else 0
    kept = drafter.rows_read(sizes.path_rows) if drafter else 0
    vocabulary = decoder.config.vocabulary
    draws: tuple[Draws, ...] = ("greedy", "sampled")
    return [accept_step(d, r, sizes, vocabulary, features, kept) for r in sorted(rows) for d in draws]


def draft_steps(
    shapes: Shapes, sizes: StepSizes, drafter: DraftModel | None, modules: Modules, static: bool
) -> list[Step]:
    """The drafter's steps: ``static`` ones at every KV length, as an accelerator runs them, or ones for any."""
    if drafter is None or modules[1] is None:
        return []
    lengths = Lengths(shapes.slots, shapes.prefill_rows) if static else ANY_LENGTH
    return drafter.steps(modules, shapes.trees, sizes, lengths)


def rebuild_drafts(
    manifest: m.Manifest, graphs: m.GraphSet, topologies: Mapping[str, Topology], modules: Modules
) -> dict[str, Step]:
    """The drafter's steps of a bundle's graph set by name, on modules that hold its weights."""
    if manifest.drafter is None or modules[1] is None:
        return {}
    drafter, dims = drafter_of(manifest.drafter), manifest.dims
    trees = [(t.name, topologies[t.name] if t.file else Budget(t.rows - 1, t.depth, t.width)) for t in manifest.trees]
    dtype = graphs.precision.activations
    sizes = StepSizes(branch_rows=dims.branch_rows, path_rows=dims.path_rows, dtype=dtype)
    extends = [graph for graph in graphs.graphs if graph.kind == "extend"]
    slots, chunks = ({getattr(graph, of) for graph in extends} for of in ("slots", "rows"))
    steps = drafter.steps(modules, trees, sizes, Lengths(tuple(sorted(slots)), tuple(sorted(chunks))))
    return {step.signature.name: step for step in steps}
