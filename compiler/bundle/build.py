"""Writes a bundle: checkpoint and trees in, a frozen directory out, whole or not at all."""

from __future__ import annotations

import contextlib
import gc
import importlib.metadata
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import msgspec

from draftwood import manifest as m
from draftwood.compiler.bundle.request import BuildRequest, check_request
from draftwood.compiler.bundle.sources import Sources, check_fit
from draftwood.compiler.bundle.staging import staged
from draftwood.compiler.drafters.model import DraftModel
from draftwood.compiler.targets.registry import TARGETS
from draftwood.compiler.targets.steps import Shapes
from draftwood.compiler.targets.target import Lowering, Progress
from draftwood.compiler.teachers.checkpoint import Checkpoint
from draftwood.compiler.teachers.config import TeacherConfig
from draftwood.compiler.teachers.formats import has_tokenizer, usual_sampling, write_tokenizer
from draftwood.errors import RequestError, TreeError
from draftwood.planned import LOOKUP
from draftwood.trees import Topology
from draftwood.trees.frozen import freeze
from draftwood.trees.spec import Budget, Lookup
from draftwood.trees.topology import branches
from draftwood.version import __version__

# New objects before the youngest are looked at, and how often that happens before older ones are.
_FEW = (100_000, 20, 100)


def build(
    request: BuildRequest,
    out: Path,
    progress: Progress = lambda _: None,
    prove: Callable[[Path], object] = lambda _: None,
) -> m.Manifest:
    """Writes the bundle ``out``; raises UserError before anything is written if the inputs do not fit. If ``prove``
    raises, nothing is left either."""
    check_request(request, out)
    with staged(out) as folder, _few_collections():
        tokenizer = _copy_tokenizer(request.model, folder)  # first: one that has no form here is refused soon
        request, sources = _fitting(request)
        for name in request.targets:
            TARGETS[name].check_installed()  # before the graphs of another target are made
        sampling = usual_sampling(request.model)
        graph_sets = tuple(s for name in request.targets for s in _lower(name, folder, request, sources, progress))
        _write_trees(folder, request.trees)
        if request.corpus:
            (folder / m.CORPUS_FILE).parent.mkdir()
            shutil.copyfile(request.corpus, folder / m.CORPUS_FILE)
        manifest = _manifest(request, sources, sampling, graph_sets, tokenizer, _files(folder))
        (folder / m.MANIFEST_FILE).write_bytes(m.encode(manifest))
        prove(folder)
    return manifest


def _fitting(request: BuildRequest) -> tuple[BuildRequest, Sources]:
    """The request with the bitwise step if its trees need it, and what it is built from."""
    sources = Sources.open(request)
    check_fit(request, sources)
    if not any(tree.nodes for _, tree in request.shapes.drafted):
        sources = replace(sources, drafter=None)  # no step would ask it for anything
    sizes, config = request.shapes.sizes(), sources.teacher.config
    past = past_bitwise(config, max(request.slots), sizes.branch_rows + sizes.path_rows)
    if request.bitwise and past:
        raise RequestError(f"--bitwise: {past}; build with less, or leave it out")
    if not request.bitwise and _needs_bitwise(request, sources):
        _check_alone(request, sources, past)
        request = replace(request, bitwise=not past)
    return request, sources


def past_bitwise(config: TeacherConfig, slots: int, rows: int = 0) -> str:
    """The size for which the bitwise step cannot hold its promise, up to a KV length; empty if there is none."""
    return m.past_bitwise(slots, rows, max(buffer.width for buffer in config.buffers))


@contextlib.contextmanager
def _few_collections() -> Iterator[None]:
    """In the body Python looks for cycles of objects less often: graphs are made of many small ones that are no
    garbage, and looking at these takes a tenth of a build."""
    usual = gc.get_threshold()
    gc.set_threshold(*_FEW)
    try:
        yield
    finally:
        gc.set_threshold(*usual)


def _needs_bitwise(request: BuildRequest, sources: Sources) -> bool:
    """Whether only the bitwise step gives the text of plain decoding. Rounding to int8 turns differences of last bits
    into whole steps, and rows off a tree's first path have other last bits."""
    return bool(_branching(request)) and _rounds_rows(sources.teacher.config) and "onnx" in request.targets


def chains_only(config: TeacherConfig, targets: Sequence[str], texts: int, slots: int) -> bool:
    """Whether no tree may branch: the bitwise step, which branching trees of rounded rows need, takes one text of some
    sizes."""
    return bool(texts > 1 or past_bitwise(config, slots)) and tuple(targets) == ("onnx",) and _rounds_rows(config)


def _rounds_rows(config: TeacherConfig) -> bool:
    return bool(config.quantised or config.packed)


def _branching(request: BuildRequest) -> list[str]:
    return [name for name, tree in request.trees if branches(tree.rows, tree.depth)]


def _check_alone(request: BuildRequest, sources: Sources, past: str) -> None:
    """Refuses what the bitwise step does not take, for a CPU alone: several texts a launch, and sizes ``past`` its
    own."""
    texts, tree = max((request.texts, *request.shapes.batches)), _branching(request)[0]
    of_rounded = f"tree {tree}: branches, and a CPU decodes such trees of a teacher in eight or four bits"
    if request.targets != ("onnx",):
        return
    if texts > 1:
        raise TreeError(
            f"{of_rounded} one text a launch; for {texts} texts give chains (--tree chain:3), or build for one"
        )
    if past:
        raise TreeError(f"{of_rounded} bit by bit; {past}; give chains (--tree chain:3), or build with less")


def _lower(
    name: str, folder: Path, request: BuildRequest, sources: Sources, progress: Progress
) -> tuple[m.GraphSet, ...]:
    target, config = TARGETS[name], sources.teacher.config
    precision = request.precisions.get(name) or target.precision(config)
    lowering = Lowering(
        folder=folder,
        shapes=request.shapes,
        config=config,
        drafter=sources.draft_model,
        weights=tuple(map(precision.stored, sources.weights(max(request.slots)))),
        precision=precision,
        mode=request.weights,
        files=sources.teacher.reader.linkable,
        ranks=request.ranks if target.splits else 1,
        progress=progress,
    )
    return target.lower(lowering)


def _write_trees(folder: Path, trees: Sequence[tuple[str, Topology | Budget]]) -> None:
    (folder / "trees").mkdir()
    for name, tree in trees:
        if isinstance(tree, Budget):
            continue
        (folder / "trees" / f"{name}.json").write_text(freeze(tree))


def _copy_tokenizer(model: Path, folder: Path) -> bool:
    if not has_tokenizer(model):
        return False
    (folder / "tokenizer").mkdir()
    return write_tokenizer(model, folder / "tokenizer")


def _files(folder: Path) -> dict[str, m.File]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): m.list_file(path) for path in files}


def _manifest(
    request: BuildRequest,
    sources: Sources,
    sampling: m.UsualSampling,
    graph_sets: tuple[m.GraphSet, ...],
    tokenizer: bool,
    files: dict[str, m.File],
) -> m.Manifest:
    config, kind, opened = sources.teacher.config, sources.draft_model, sources.drafter
    return m.Manifest(
        schema_version=m.SCHEMA_VERSION,
        dims=_dims(config, request.shapes),
        teacher=_teacher(sources.teacher, sampling),
        drafter=kind.manifest(opened.digest(), config, request.shapes.drafted) if kind and opened else None,
        trees=tuple(_tree(name, tree) for name, tree in request.trees),
        gears=_gears(request.shapes, graph_sets[0].graphs, kind),
        planning=request.planning,
        graph_sets=graph_sets,
        tokenizer=tokenizer,
        provenance=_provenance(request.targets),
        files=files,
    )


def _teacher(teacher: Checkpoint, sampling: m.UsualSampling) -> m.Teacher:
    config = teacher.config
    return m.Teacher(
        digest=teacher.digest(), bos=config.bos, eos=config.eos, sampling=sampling, buffers=config.buffers,
        config=asdict(config),
    )  # fmt: skip


def _dims(config: TeacherConfig, shapes: Shapes) -> m.Dims:
    sizes = shapes.sizes()
    return m.Dims(
        hidden=config.hidden,
        heads=config.heads,
        vocabulary=config.vocabulary,
        branch_rows=sizes.branch_rows,
        path_rows=sizes.path_rows,
        context=max(shapes.slots) - 1,
    )


def _gears(shapes: Shapes, graphs: Sequence[m.GraphSignature], drafter: DraftModel | None) -> tuple[m.Gear, ...]:
    """The gears with their graphs, which have the same names in all sets."""
    trees = dict(shapes.trees)
    return tuple(
        msgspec.structs.replace(
            gear,
            graph=_graph_of(graphs, trees[gear.tree].rows, gear.slots),
            draft=_draft_of(gear.tree, trees[gear.tree], drafter),
        )
        for gear in shapes.gears
    )


def _draft_of(name: str, tree: Topology | Budget, drafter: DraftModel | None) -> str | None:
    """The name of a tree's drafter: the drafter's kind, or lookup."""
    if isinstance(tree, Lookup):
        return LOOKUP
    return drafter.draft_name(name) if drafter and tree.nodes else None


def _graph_of(graphs: Sequence[m.GraphSignature], rows: int, slots: int) -> str:
    kind = "decode" if rows == 1 else "verify"
    fits = (g for g in graphs if g.kind == kind and g.slots == slots and (kind == "decode" or g.rows == rows))
    return next(fits).name


def _tree(name: str, tree: Topology | Budget) -> m.Tree:
    file = None if isinstance(tree, Budget) else f"trees/{name}.json"
    return m.Tree(name=name, file=file, rows=tree.rows, depth=tree.depth, width=tree.width)


def _provenance(targets: Sequence[str]) -> dict[str, str]:
    """Versions of the installed packages that make graphs; an NPU's graphs are made without ONNX."""
    versions = {"draftwood": __version__}
    for package in ("torch", *(("torch_npu",) if "ge" in targets else ()), "onnx", "onnxscript", "onnx-ir"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions
