"""Builds a bundle: checkpoint and trees in, a frozen directory out, whole or not at all."""

from __future__ import annotations

import importlib.metadata
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

import draftwood
from draftwood import manifest as m
from draftwood.compiler.checkpoint import Checkpoint, tokenizer_files
from draftwood.compiler.config import TeacherConfig, rope_tables
from draftwood.compiler.decoder import Decoder
from draftwood.compiler.medusa import MedusaHeads
from draftwood.compiler.medusa_checkpoint import MedusaCheckpoint
from draftwood.compiler.onnx_lowering import lower_to_onnx, trace
from draftwood.compiler.steps import Step, StepSizes, cpu_step, medusa_step, prefill_step, verify_step
from draftwood.compiler.weights import WeightEntry, WeightSpan, map_weights, write_weights
from draftwood.errors import RequestError, TreeError
from draftwood.trees import Topology
from draftwood.trees.frozen import freeze

WEIGHTS_FILE = "onnx/weights.safetensors"
PREFILL_ROWS = (32, 128)
# A cache is a multiple of this many slots: fused kernels tile the KV axis in blocks of 128.
SLOT_MULTIPLE = 128
# The draft step ranks at least this many tokens a level, so that a bundle can be calibrated for wider trees.
LEAST_CANDIDATES = 10

Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildRequest:
    """What to build. ``trees`` are named, the plain tree first; ``slots`` are KV lengths C, ascending."""

    model: Path
    drafter: Path | None
    trees: tuple[tuple[str, Topology], ...]
    slots: tuple[int, ...]

    @property
    def sizes(self) -> StepSizes:
        """What the largest tree asks of every static step."""
        rows, depths = zip(*((tree.rows, tree.depth) for _, tree in self.trees), strict=True)
        return StepSizes(branch_rows=max(rows), path_rows=max(depths) + 1)


def build(request: BuildRequest, out: Path, progress: Progress = lambda _: None) -> m.Manifest:
    """Writes the bundle ``out``; raises UserError before anything is written where the inputs do not fit."""
    teacher = Checkpoint.open(request.model)
    drafter = MedusaCheckpoint.open(request.drafter, teacher.config) if request.drafter else None
    _check(request, teacher.config, drafter, out)
    with _staged(out) as folder:
        progress("weights")
        (folder / "onnx").mkdir()
        spans = _write_weights(folder / WEIGHTS_FILE, teacher, drafter, max(request.slots))
        decoder, heads = load_modules(folder / WEIGHTS_FILE, teacher.config, _head_shape(drafter))
        widest = max(LEAST_CANDIDATES, *(tree.width for _, tree in request.trees))
        candidates = min(widest, teacher.config.vocabulary)
        steps = _steps(request, decoder, heads, candidates)
        for step in steps:
            progress(step.signature.name)
            path = folder / step.signature.file
            lower_to_onnx(step, trace(step), spans, Path(WEIGHTS_FILE).name, path)
        _write_trees(folder, request.trees)
        tokenizer = _copy_tokenizer(request.model, folder)
        manifest = _manifest(request, teacher, drafter, steps, candidates, tokenizer, _digests(folder))
        (folder / m.MANIFEST_FILE).write_bytes(m.encode(manifest))
    return manifest


def load_modules(
    weights: Path, config: TeacherConfig, heads: tuple[int, int, bool] | None
) -> tuple[Decoder, MedusaHeads | None]:
    """The eager modules over a memory map of a bundle's weights; ``heads`` = (heads, blocks, tied)."""
    tensors = map_weights(weights)
    with torch.device("meta"):
        decoder = Decoder(config, tensors["rope_cos"].shape[0])
        drafter = MedusaHeads(config.hidden, config.vocabulary, *heads) if heads else None
    mine = {name: t for name, t in tensors.items() if not name.startswith("heads.")}
    decoder.load_state_dict(mine, assign=True)
    if drafter is not None:
        drafter.load_state_dict({n: t for n, t in tensors.items() if n.startswith("heads.")}, assign=True)
    return decoder.requires_grad_(False), drafter.requires_grad_(False) if drafter else None


def _head_shape(drafter: MedusaCheckpoint | None) -> tuple[int, int, bool] | None:
    return (drafter.heads, drafter.blocks, drafter.tied) if drafter else None


def _check(request: BuildRequest, config: TeacherConfig, drafter: MedusaCheckpoint | None, out: Path) -> None:
    if out.exists():
        raise RequestError(f"{out}: exists already; expected a new folder; remove it or choose another --out")
    for slots in request.slots:
        if slots % SLOT_MULTIPLE or slots <= 0:
            raise RequestError(f"--kv {slots}: expected a positive multiple of {SLOT_MULTIPLE} cache slots")
        if slots > config.max_positions:
            raise RequestError(
                f"--kv {slots}: the teacher knows {config.max_positions} positions; choose at most"
                f" {config.max_positions // SLOT_MULTIPLE * SLOT_MULTIPLE}"
            )
    levels = drafter.heads if drafter else 0
    for name, tree in request.trees:
        if tree.depth > levels:
            have = f"the drafter has {levels} heads" if drafter else "there is no --drafter"
            raise TreeError(f"tree {name}: {tree.depth} levels deep, but {have}; choose a shallower tree")
        if tree.rows + tree.depth + 1 >= min(request.slots):
            raise TreeError(f"tree {name}: {tree.rows} rows do not fit KV length {min(request.slots)}; raise --kv")
        if tree.width > config.vocabulary:
            raise TreeError(f"tree {name}: rank {tree.width - 1} is past the vocabulary of {config.vocabulary}")


@contextmanager
def _staged(out: Path) -> Iterator[Path]:
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


def _write_weights(
    path: Path, teacher: Checkpoint, drafter: MedusaCheckpoint | None, positions: int
) -> dict[str, WeightSpan]:
    config = teacher.config
    with torch.device("meta"):
        shapes = {name: tuple(t.shape) for name, t in Decoder(config, positions).state_dict().items()}
        if drafter:
            heads = MedusaHeads(config.hidden, config.vocabulary, drafter.heads, drafter.blocks, drafter.tied)
            head_shapes = {name: tuple(t.shape) for name, t in heads.state_dict().items()}
    entries = [WeightEntry(n, shapes[n], partial(teacher.weight, n)) for n in teacher.names()]
    if drafter:
        entries += [WeightEntry(n, head_shapes[n], partial(drafter.weight, n)) for n in drafter.names()]
    tables = zip(("rope_cos", "rope_sin"), rope_tables(config, positions), strict=True)
    entries += [WeightEntry(name, table.shape, partial(torch.from_numpy, table)) for name, table in tables]
    return write_weights(path, entries)


def _steps(request: BuildRequest, decoder: Decoder, heads: MedusaHeads | None, candidates: int) -> list[Step]:
    rows = sorted({tree.rows for _, tree in request.trees})
    sizes = request.sizes
    steps = [cpu_step(decoder)]
    for slots in request.slots:
        steps += [prefill_step(decoder, sizes, r, slots) for r in PREFILL_ROWS if r < slots]
        steps += [verify_step(decoder, sizes, r, slots) for r in rows]
    return steps if heads is None else [*steps, medusa_step(heads, decoder, candidates)]


def _write_trees(folder: Path, trees: Sequence[tuple[str, Topology]]) -> None:
    (folder / "trees").mkdir()
    for name, tree in trees:
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
    teacher: Checkpoint,
    drafter: MedusaCheckpoint | None,
    steps: list[Step],
    candidates: int,
    tokenizer: bool,
    files: dict[str, str],
) -> m.Manifest:
    config = teacher.config
    graphs = {(s.signature.rows, s.signature.slots): s.signature.name for s in steps if s.signature.kind != "prefill"}
    sizes = request.sizes
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
        teacher=m.Teacher(digest=teacher.digest(), bos=config.bos, eos=config.eos, config=asdict(config)),
        drafter=_drafter(drafter, candidates) if drafter else None,
        trees=tuple(
            m.Tree(name=n, file=f"trees/{n}.json", rows=t.rows, depth=t.depth, width=t.width) for n, t in request.trees
        ),
        gears=tuple(
            m.Gear(name=f"{n}-kv{c}", tree=n, slots=c, graph=graphs[t.rows, c])
            for n, t in request.trees
            for c in request.slots
        ),
        graphs=tuple(step.signature for step in steps),
        weights=WEIGHTS_FILE,
        tokenizer=tokenizer,
        provenance=_provenance(),
        files=files,
    )


def _drafter(drafter: MedusaCheckpoint, candidates: int) -> m.Drafter:
    return m.Drafter(
        kind="medusa",
        digest=drafter.digest(),
        levels=drafter.heads,
        candidates=candidates,
        blocks=drafter.blocks,
        tied=drafter.tied,
    )


def _provenance() -> dict[str, str]:
    packages = ("torch", "onnx", "onnxscript", "onnx-ir")
    return {"draftwood": draftwood.__version__, **{p: importlib.metadata.version(p) for p in packages}}


__all__ = ["BuildRequest", "build", "load_modules"]
