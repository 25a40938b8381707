"""The ``npu`` folder of a bundle: every step as an ``.air`` file that has been proved and checked."""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterator, Sequence
from itertools import chain
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram

from draftwood import manifest as m
from draftwood.compiler.checkpoints.safetensors_file import byte_offset
from draftwood.compiler.checkpoints.weight import WeightEntry
from draftwood.compiler.drafters.model import Modules
from draftwood.compiler.ge.atc import SOC, atc_script
from draftwood.compiler.ge.graph import Graph
from draftwood.compiler.ge.lowering import lower_to_ge
from draftwood.compiler.ge.proofs import prove
from draftwood.compiler.ge.texts import texts_step
from draftwood.compiler.ge.torchair_bridge import decomposed, source_line, torchair_folder
from draftwood.compiler.ge.weights import WeightIndex, plan_weights, write_index, write_npu_weights
from draftwood.compiler.ranks.collectives import group_of
from draftwood.compiler.steps.short import ShortStep, Unlike, shortened
from draftwood.compiler.steps.step import Step
from draftwood.compiler.steps.tracing import shapes_only, trace
from draftwood.compiler.targets.steps import (
    Shapes,
    accept_steps,
    draft_steps,
    static_steps,
    texts_steps,
    whole_steps,
)
from draftwood.compiler.targets.storage import BF16, FP16, Storage, nbits, w8a8
from draftwood.compiler.targets.target import Lowering, Target
from draftwood.compiler.teachers.config import TeacherConfig
from draftwood.errors import LoweringError, RequestError
from draftwood.kernels.int4 import most_rows
from draftwood.versions import least_cann

FOLDER = "npu"
INDEX_FILE = "weights.json"
WEIGHTS_FILE = "weights.bin"
# With one query row the fused attention may ignore its mask past 512 slots (vllm-project/vllm-ascend issue 15503). A
# second row, whose result is not read, costs nothing compared with the weights.
DECODE_ROWS = 2


class GeTarget(Target):
    """Graphs for an Ascend NPU, lowered without ever holding the weights."""

    name = "ge"
    modes = ("copy", "link", "none")
    splits = True

    def check_installed(self) -> None:
        torchair_folder()

    def precision(self, config: TeacherConfig) -> Storage:
        """The teacher's own type if the fused attention takes it, else bf16, which has fp32's range."""
        plain = FP16 if config.dtype == "float16" else BF16
        if config.packed:
            return nbits(plain)
        return w8a8(plain) if config.quantised else plain

    def check(self, precision: Storage) -> None:
        types = precision.types
        used = {precision.plain, types.activations, types.caches}
        if len(used) > 1 or not used <= {"float16", "bfloat16"}:
            raise RequestError(
                f"precision {types.name}: keeps numbers in {', '.join(sorted(used))}; the fused attention of an NPU"
                " takes one of float16 and bfloat16 for all"
            )

    def lower(self, lowering: Lowering) -> tuple[m.GraphSet, ...]:
        """Writes ``npu/``: the graphs, which all ranks share, and the weights of every rank.

        Raises:
            LoweringError: a step has an operator without a converter, copies a cache, or breaks a rule of the fused
                attention.
        """
        _check_rows(lowering.shapes, lowering.config)
        (lowering.folder / FOLDER).mkdir()
        index = _plan(lowering)
        with shapes_only(lowering.precision.weights) as mode:
            modules = lowering.modules()
        _check_shapes(lowering, index, modules)
        types = lowering.precision.types
        short = shortened(modules[0])
        cut = _steps(lowering, (short.decoder, modules[1])) if short else []
        shorts = {step.signature.name: ShortStep(short, step) for step in cut if short and step.has_blocks}
        graphs, used = [], set[str]()
        for step in _steps(lowering, modules):
            lowering.progress(f"npu {step.signature.name}")
            with group_of(lowering.ranks):
                program, air = _lowered(step, index, mode, shorts.get(step.signature.name))
            graph, operators = _written(lowering, step, index, program, air)
            graphs.append(graph)
            used |= operators
            for texts in lowering.shapes.batches if step.signature.kind == "draft" else ():
                several = texts_step(step, program, texts)
                graph, operators = _written(lowering, several, index, *_lowered(several, index, mode, None))
                graphs.append(graph)
                used |= operators
        if lowering.ranks == 1:  # ATC compiles no graph with collectives for these chips
            packed, later = bool(lowering.config.packed), WEIGHTS_FILE if lowering.mode == "none" else ""
            script = atc_script([graph.file for graph in graphs], packed, index.linked, later)
            (lowering.folder / FOLDER / "atc.sh").write_text(script)
        return tuple(
            m.GraphSet(
                target=self.name,
                rank=rank,
                ranks=lowering.ranks,
                precision=types,
                weights=f"{folder}/{WEIGHTS_FILE}",
                index=f"{folder}/{INDEX_FILE}",
                soc=SOC,
                graphs=tuple(graphs),
                needs={"cann": least_cann(used)},
            )
            for rank, folder in enumerate(_write(lowering, index))
        )


def _check_rows(shapes: Shapes, config: TeacherConfig) -> None:
    """RequestError if a step has so many rows that its packed layers are computed unlike plain decoding's."""
    most = min((most_rows(layer.group) for layer in config.packed if layer.group), default=None)
    together = max((1, *shapes.batches))
    for name, tree in shapes.trees:
        rows = together * max(tree.rows, DECODE_ROWS)
        if most is not None and rows > most:
            raise RequestError(
                f"tree {name}: {rows} rows a launch; expected at most {most} with --precision nbits, beyond which the"
                " NPU's kernel rounds packed weights and gives other texts; choose smaller trees or fewer --batch-size"
            )


def _plan(lowering: Lowering) -> WeightIndex:
    entries, dtype = lowering.rank_weights(0), lowering.precision.weights
    wide = _wide_biases(entries)
    return plan_weights(
        {e.name: e.shape for e in entries},
        dtype,
        WEIGHTS_FILE,
        {e.name: e.parts for e in entries},
        _linked(lowering, wide.keys()) if lowering.mode == "link" else {},
        {e.name: e.dtype for e in entries if e.dtype not in (None, dtype)} | wide,
    )


def _wide_biases(entries: Sequence[WeightEntry]) -> dict[str, torch.dtype]:
    """Biases of bf16 products, of plain or packed weights, which lie in float32: no kernel adds another to them, so GE
    would cast each time."""
    types = {e.name: e.dtype for e in entries}
    layers = {name: name.removesuffix(".bias") for name in types if name.endswith(".bias")}
    half = torch.bfloat16
    return {
        name: torch.float32
        for name, layer in layers.items()
        if types[name] == half and types.get(f"{layer}.weight") in (half, torch.int32)
    }


def _linked(lowering: Lowering, wide: Container[str]) -> dict[str, tuple[Path, int]]:
    """Weights that the teacher's files hold in the form needed: one tensor of the right type."""
    if not lowering.precision.keeps(lowering.config.dtype):
        return {}
    files = lowering.files
    return {
        e.name: (files[e.parts[0]].file.resolve(), byte_offset(files[e.parts[0]].file, e.parts[0]))
        for e in lowering.rank_weights(0)
        if len(e.parts) == 1 and e.parts[0] in files and e.name not in wide
    }


def _check_shapes(lowering: Lowering, index: WeightIndex, modules: Modules) -> None:
    """Compares the split's plan with the networks: they must agree on every weight's shape."""
    for name, value in chain.from_iterable(module.state_dict().items() for module in modules if module):
        shape = index.constants[name].shape if name in index.constants else None
        if shape != tuple(value.shape):
            raise LoweringError(
                f"--ranks {lowering.ranks}: weight {name} is cut to {shape}; the network of a rank has"
                f" {tuple(value.shape)}; the plan of the split knows no such layer, build for one rank"
            )


def rank_folder(rank: int, ranks: int) -> str:
    """The folder of a rank's weights and their index in a bundle."""
    return FOLDER if ranks == 1 else f"{FOLDER}/rank-{rank}"


def _write(lowering: Lowering, index: WeightIndex) -> Iterator[str]:
    """Index and weights of every rank; yields the folder of each. One tensor is in memory at a time."""
    for rank in range(lowering.ranks):
        name = rank_folder(rank, lowering.ranks)
        folder = lowering.folder / name
        folder.mkdir(exist_ok=True)
        write_index(folder / INDEX_FILE, index)
        if lowering.mode != "none":
            lowering.progress("npu weights" if lowering.ranks == 1 else f"npu weights of rank {rank}")
            _write_weights(folder / WEIGHTS_FILE, lowering.rank_weights(rank), index)
        yield name


def _write_weights(path: Path, entries: Sequence[WeightEntry], index: WeightIndex) -> None:
    """The weights file; those that stay in the checkpoint's are read as well, to be checked."""
    reads = {e.name: e.read for e in entries}
    write_npu_weights(path, index, lambda name: reads[name]())
    for name, constant in index.constants.items():
        if constant.location != path.name:
            reads[name]()


def _steps(lowering: Lowering, modules: Modules) -> list[Step]:
    """All steps of teacher and drafter."""
    shapes, drafter = lowering.shapes, lowering.drafter
    sizes = shapes.sizes(lowering.precision.types.activations, least_rows=DECODE_ROWS)
    steps = static_steps(shapes, sizes, modules[0], decode_rows=DECODE_ROWS, form="npu")
    steps += accept_steps(shapes, sizes, modules[0], drafter, decode_rows=DECODE_ROWS)
    steps += texts_steps(shapes, sizes, modules[0], drafter, DECODE_ROWS)
    steps += draft_steps(shapes, sizes, drafter, modules, static=True)
    return steps + (whole_steps(shapes, sizes, drafter, modules, DECODE_ROWS) if shapes.whole else [])


def _lowered(
    step: Step, index: WeightIndex, mode: FakeTensorMode, short: ShortStep | None
) -> tuple[ExportedProgram, bytes]:
    """A trace, of one block of each kind if that is enough, and the ``.air`` file that is made of it."""
    if short is not None:
        with mode:
            program = trace(short.step)
        with contextlib.suppress(Unlike):
            return program, lower_to_ge(step, program, index, short)
    with mode:
        program = trace(step)
    return program, lower_to_ge(step, program, index)


def _written(
    lowering: Lowering, step: Step, index: WeightIndex, program: ExportedProgram, air: bytes
) -> tuple[m.GraphSignature, set[str]]:
    """The step's signature with its file, which is proved and checked, and the operators of its graph."""
    signature = step.signature.frozen_in(f"{FOLDER}/{step.signature.name}.air")
    path = lowering.folder / signature.file
    path.write_bytes(air)
    graph = Graph.load(path)
    prove(graph, signature, index, lambda node: f"{node}, {_origin(program, graph, node)}")
    path.with_suffix(".txt").write_text(graph.text())
    return signature, {*graph.counts()}


def _origin(program: ExportedProgram, graph: Graph, name: str) -> str:
    """Operator and source line of a node's program; torchair notes them on the last node of each conversion."""
    nodes = list(graph.nodes.values())
    following = nodes[[node.name for node in nodes].index(name) :]
    noted = next((declared.source for node in following for declared in node.output_types if declared.source), "")
    traced = next((node for node in decomposed(program).graph.nodes if node.name == noted), None)
    line = source_line(traced).rpartition("draftwood/")[2] if traced is not None else ""
    return f"{traced.target} at {line}" if traced is not None else "of no line of the program"
