"""Builds a bundle: checkpoint and trees in, a frozen directory out, whole or not at all."""

from __future__ import annotations

import importlib.metadata
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from draftwood import manifest as m
from draftwood.compiler.bundle.gears import every_gear, gear_names, planning_of
from draftwood.compiler.bundle.weights import WeightEntry, map_weights, write_weights
from draftwood.compiler.drafters.kinds import ANY_LENGTH, Drafter, Lengths, Modules, OpenedDrafter, drafter_of
from draftwood.compiler.onnx.lowering import lower_to_onnx
from draftwood.compiler.steps.teacher import Step, StepSizes, cpu_step, prefill_step, verify_step
from draftwood.compiler.steps.tracing import trace
from draftwood.compiler.teachers.checkpoint import Checkpoint, teacher_parts, tokenizer_files
from draftwood.compiler.teachers.config import TeacherConfig, rope_tables
from draftwood.compiler.teachers.decoder import Decoder
from draftwood.errors import RequestError, TreeError
from draftwood.trees import Topology
from draftwood.trees.frozen import freeze
from draftwood.trees.plan_file import ReadPlan
from draftwood.trees.spec import Budget, GearSpec
from draftwood.version import __version__

WEIGHTS_FILE = "onnx/weights.safetensors"
PREFILL_ROWS = (32, 128)
# A cache is a multiple of this many slots: fused kernels tile the KV axis in blocks of 128.
SLOT_MULTIPLE = 128

Target = Literal["onnx", "ge"]
# What happens to an NPU's weights: written into the bundle; used in the checkpoint's own files where they lie there
# as they are needed; or left out, to be bound later.
WeightMode = Literal["copy", "link", "none"]
Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildRequest:
    """What to build. ``trees`` are named, the plain tree first; ``slots`` are KV lengths C, ascending."""

    model: Path
    drafter: Path | None
    trees: tuple[tuple[str, Topology | Budget], ...]
    slots: tuple[int, ...]
    prefill_rows: tuple[int, ...] = PREFILL_ROWS
    targets: tuple[Target, ...] = ("onnx",)
    weights: WeightMode = "copy"
    # The chip that the NPU's compile commands name.
    soc: str = "Ascend910B3"
    # What is built of the trees and KV lengths; every tree at every length where none are given.
    gears: tuple[GearSpec, ...] = ()
    # The plan they come from, whose figures go into the manifest.
    plan: ReadPlan | None = None

    @property
    def all_gears(self) -> tuple[GearSpec, ...]:
        """The gears to build."""
        return self.gears or every_gear(self.trees, self.slots)

    @property
    def sizes(self) -> StepSizes:
        """What the largest tree asks of every static step."""
        rows, depths = zip(*((tree.rows, tree.depth) for _, tree in self.trees), strict=True)
        return StepSizes(branch_rows=max(rows), path_rows=max(depths) + 1)


@dataclass(frozen=True, slots=True)
class Sources:
    """The opened checkpoints of a request."""

    teacher: Checkpoint
    drafter: OpenedDrafter | None

    @classmethod
    def open(cls, request: BuildRequest) -> Sources:
        """Reads headers only; without weights, configurations only."""
        if request.weights == "none":
            teacher = Checkpoint.describe(request.model)
            return cls(teacher, OpenedDrafter.describe(request.drafter) if request.drafter else None)
        teacher = Checkpoint.open(request.model)
        return cls(teacher, OpenedDrafter.open(request.drafter, teacher) if request.drafter else None)

    @property
    def kind(self) -> Drafter | None:
        """The drafter without its weights."""
        return self.drafter.drafter if self.drafter else None

    def modules(self, positions: int) -> Modules:
        """The modules without values, on the device of the context."""
        return _modules(self.teacher.config, self.kind, positions)

    def weights(self, positions: int) -> list[WeightEntry]:
        """Every weight of the bundle, rotary tables for ``positions`` positions among them."""
        teacher, drafter = self.teacher, self.drafter
        with torch.device("meta"):
            modules = self.modules(positions)
        shapes = {n: tuple(t.shape) for module in modules if module for n, t in module.state_dict().items()}
        parts = teacher_parts(teacher.config)
        entries = [WeightEntry(n, shapes[n], partial(teacher.weight, n), parts[n]) for n in parts]
        if drafter:
            entries += drafter.weights(shapes, positions)
        tables = zip(("rope_cos", "rope_sin"), rope_tables(teacher.config, positions), strict=True)
        return entries + [WeightEntry(name, table.shape, partial(torch.from_numpy, table)) for name, table in tables]


def build(request: BuildRequest, out: Path, progress: Progress = lambda _: None) -> m.Manifest:
    """Writes the bundle ``out``; raises UserError before anything is written where the inputs do not fit."""
    _check_request(request, out)
    sources = Sources.open(request)
    _check_fit(request, sources)
    with staged(out) as folder:
        graphs = _lower_onnx(folder, request, sources, progress) if "onnx" in request.targets else ()
        npu = None
        if "ge" in request.targets:
            from draftwood.compiler.ge.target import lower_for_npu  # needs the torch_npu package

            npu = lower_for_npu(folder, request, sources, progress)
        _write_trees(folder, request.trees)
        tokenizer = _copy_tokenizer(request.model, folder)
        manifest = _manifest(request, sources, graphs, npu, tokenizer, _digests(folder))
        (folder / m.MANIFEST_FILE).write_bytes(m.encode(manifest))
    return manifest


def load_modules(weights: Path | Mapping[str, Tensor], config: TeacherConfig, drafter: Drafter | None) -> Modules:
    """The eager modules over a memory map of a bundle's weights."""
    tensors = map_weights(weights) if isinstance(weights, Path) else weights
    with torch.device("meta"):
        modules = _modules(config, drafter, tensors["rope_cos"].shape[0])
    for module in modules:
        if module is not None:
            module.load_state_dict({name: tensors[name] for name in module.state_dict()}, assign=True)
            module.requires_grad_(False)  # assigned parameters bring their own flag
    return modules


def _modules(config: TeacherConfig, drafter: Drafter | None, positions: int) -> Modules:
    decoder = Decoder(config, positions, drafter.aux_layers if drafter else ()).requires_grad_(False)
    return decoder, drafter.module(config, positions).requires_grad_(False) if drafter else None


def static_steps(request: BuildRequest, sizes: StepSizes, decoder: Decoder, decode_rows: int = 1) -> list[Step]:
    """The teacher's steps of every gear, as an accelerator runs them; plain decoding is padded to ``decode_rows``."""
    rows_of = {name: tree.rows for name, tree in request.trees}
    steps = []
    for slots in request.slots:
        steps += [prefill_step(decoder, sizes, r, slots) for r in request.prefill_rows if r < slots]
        steps.append(verify_step(decoder, sizes, decode_rows, slots, decode=True))
        rows = {rows_of[gear.trees[0]] for gear in request.all_gears if gear.slots == slots}
        steps += [verify_step(decoder, sizes, r, slots, decode=False) for r in sorted(rows - {1})]
    return steps


def draft_steps(
    request: BuildRequest,
    sizes: StepSizes,
    drafter: Drafter | None,
    modules: Modules,
    static: bool,
) -> list[Step]:
    """The drafter's steps: ``static`` ones at every KV length, as an accelerator runs them, or ones for any."""
    if drafter is None or modules[1] is None:
        return []
    lengths = Lengths(request.slots, request.prefill_rows) if static else ANY_LENGTH
    return drafter.steps(modules, request.trees, sizes, lengths)


def rebuild_drafts(
    manifest: m.Manifest, topologies: Mapping[str, Topology], modules: Modules, npu: bool
) -> dict[str, Step]:
    """The drafter's steps of a bundle by name, on modules that hold its weights; those of its NPU if ``npu``."""
    if manifest.drafter is None or modules[1] is None:
        return {}
    drafter, dims = drafter_of(manifest.drafter), manifest.dims
    trees = [(t.name, topologies[t.name] if t.file else Budget(t.rows - 1, t.depth, t.width)) for t in manifest.trees]
    graphs, dtype = manifest.graphs, "float32"
    if npu and manifest.npu:
        graphs, dtype = manifest.npu.graphs, manifest.npu.dtype
    sizes = StepSizes(branch_rows=dims.branch_rows, path_rows=dims.path_rows, dtype=dtype)
    extends = [graph for graph in graphs if graph.kind == "extend"]
    slots, chunks = ({getattr(graph, of) for graph in extends} for of in ("slots", "rows"))
    steps = drafter.steps(modules, trees, sizes, Lengths(tuple(sorted(slots)), tuple(sorted(chunks))))
    return {step.signature.name: step for step in steps}


def _check_request(request: BuildRequest, out: Path) -> None:
    """What can be said before a file is opened."""
    if out.exists():
        raise RequestError(f"{out}: exists already; expected a new folder; remove it or choose another --out")
    if request.weights != "copy" and request.targets != ("ge",):
        raise RequestError(f"--weights {request.weights}: ONNX graphs need their weights; give --target ge alone")
    for slots in request.slots:
        if slots % SLOT_MULTIPLE or slots <= 0:
            raise RequestError(f"--kv {slots}: expected a positive multiple of {SLOT_MULTIPLE} cache slots")
    if min(request.prefill_rows) < 1 or min(request.prefill_rows) >= max(request.slots):
        raise RequestError(
            f"--prefill {min(request.prefill_rows)}: expected chunks of 1 token or more, below KV length"
            f" {max(request.slots)}"
        )
    trees = dict(request.trees)
    for gear in request.all_gears:
        for name in gear.trees:
            if trees[name].rows + trees[name].depth + 1 >= gear.slots:
                raise TreeError(f"tree {name}: {trees[name].rows} rows do not fit KV length {gear.slots}; raise --kv")


def _check_fit(request: BuildRequest, sources: Sources) -> None:
    """Whether the checkpoints can serve the request."""
    config, drafter = sources.teacher.config, sources.kind
    longest = max(request.slots)
    if longest > config.max_positions:
        raise RequestError(
            f"--kv {longest}: the teacher knows {config.max_positions} positions; choose at most"
            f" {config.max_positions // SLOT_MULTIPLE * SLOT_MULTIPLE}"
        )
    for gear in request.all_gears:
        if drafter is not None and len({drafter.draft_name(name) for name in gear.trees}) > 1:
            raise TreeError(
                f"gear of {', '.join(gear.trees)}: this drafter has a graph for each tree, so it cannot choose one by"
                " its own confidence; plan with --classes 1"
            )
    for name, tree in request.trees:
        if drafter is not None:
            drafter.check_tree(name, tree, config)
        elif tree.nodes:
            raise TreeError(f"tree {name}: {tree.depth} levels deep, but there is no --drafter; name one")


@contextmanager
def staged(out: Path) -> Iterator[Path]:
    """A temporary folder beside ``out`` that becomes ``out`` if the body succeeds, and vanishes otherwise."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    except OSError as error:
        raise RequestError(f"{out}: cannot be written ({error}); choose another --out") from error
    try:
        yield folder
        folder.chmod(0o755)
        folder.rename(out)
    except OSError as error:
        raise RequestError(f"{out}: cannot be written ({error}); choose another --out") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _lower_onnx(
    folder: Path, request: BuildRequest, sources: Sources, progress: Progress
) -> tuple[m.GraphSignature, ...]:
    progress("weights")
    (folder / "onnx").mkdir()
    spans = write_weights(folder / WEIGHTS_FILE, sources.weights(max(request.slots)))
    modules = load_modules(folder / WEIGHTS_FILE, sources.teacher.config, sources.kind)
    steps = [cpu_step(modules[0]), *static_steps(request, request.sizes, modules[0])]
    steps += draft_steps(request, request.sizes, sources.kind, modules, static=False)
    for step in steps:
        progress(step.signature.name)
        lower_to_onnx(step, trace(step), spans, Path(WEIGHTS_FILE).name, folder / step.signature.file)
    return tuple(step.signature for step in steps)


def _write_trees(folder: Path, trees: Sequence[tuple[str, Topology | Budget]]) -> None:
    (folder / "trees").mkdir()
    for name, tree in trees:
        if isinstance(tree, Budget):
            continue
        (folder / "trees" / f"{name}.json").write_text(freeze(tree))


def _copy_tokenizer(model: Path, folder: Path) -> bool:
    files = tokenizer_files(model)
    if not any(path.name == "tokenizer.json" for path in files):
        return False
    (folder / "tokenizer").mkdir()
    for path in files:
        shutil.copyfile(path, folder / "tokenizer" / path.name)
    return True


def _digests(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): m.file_digest(path) for path in files}


def _manifest(
    request: BuildRequest,
    sources: Sources,
    graphs: tuple[m.GraphSignature, ...],
    npu: m.NpuTarget | None,
    tokenizer: bool,
    files: dict[str, str],
) -> m.Manifest:
    config, sizes, kind, opened = sources.teacher.config, request.sizes, sources.kind, sources.drafter
    trees, gears = dict(request.trees), request.all_gears
    return m.Manifest(
        schema_version=m.SCHEMA_VERSION,
        dims=m.Dims(
            layers=config.layers,
            hidden=config.hidden,
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            vocabulary=config.vocabulary,
            branch_rows=sizes.branch_rows,
            path_rows=sizes.path_rows,
            context=max(request.slots) - 1,
        ),
        teacher=m.Teacher(digest=sources.teacher.digest(), bos=config.bos, eos=config.eos, config=asdict(config)),
        drafter=kind.manifest(opened.digest(), config, request.trees) if kind and opened else None,
        trees=tuple(_tree(name, tree) for name, tree in request.trees),
        gears=tuple(
            m.Gear(
                name=name,
                tree=gear.trees[0],
                slots=gear.slots,
                graph=_graph_of(graphs or (npu.graphs if npu else ()), trees[gear.trees[0]].rows, gear.slots),
                draft=kind.draft_name(gear.trees[0]) if kind and trees[gear.trees[0]].nodes else None,
                class_trees=gear.trees[1:],
            )
            for name, gear in zip(gear_names(gears), gears, strict=True)
        ),
        graphs=graphs,
        weights=WEIGHTS_FILE if graphs else None,
        npu=npu,
        tokenizer=tokenizer,
        provenance=_provenance(),
        files=files,
        planning=planning_of(request.plan, gears) if request.plan else None,
    )


def _graph_of(graphs: Sequence[m.GraphSignature], rows: int, slots: int) -> str:
    kind = "decode" if rows == 1 else "verify"
    fits = (g for g in graphs if g.kind == kind and g.slots == slots and (kind == "decode" or g.rows == rows))
    return next(fits).name


def _tree(name: str, tree: Topology | Budget) -> m.Tree:
    file = None if isinstance(tree, Budget) else f"trees/{name}.json"
    return m.Tree(name=name, file=file, rows=tree.rows, depth=tree.depth, width=tree.width)


def _provenance() -> dict[str, str]:
    packages = ("torch", "onnx", "onnxscript", "onnx-ir")
    return {"draftwood": __version__, **{p: importlib.metadata.version(p) for p in packages}}


__all__ = [
    "PREFILL_ROWS",
    "BuildRequest",
    "Sources",
    "build",
    "draft_steps",
    "load_modules",
    "rebuild_drafts",
    "staged",
    "static_steps",
]
