"""The ``npu`` folder of a bundle: every step as an ``.air`` file that has been proved and checked."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import msgspec
from torch._subclasses.fake_tensor import FakeTensorMode

from draftwood import manifest as m
from draftwood.compiler.checkpoints.safetensors_file import byte_offset
from draftwood.compiler.ge.atc import atc_script
from draftwood.compiler.ge.constraints import check_constraints
from draftwood.compiler.ge.graph import Graph
from draftwood.compiler.ge.interpreter import shapes
from draftwood.compiler.ge.lowering import lower_to_ge
from draftwood.compiler.ge.proofs import prove_in_place
from draftwood.compiler.ge.weights import WeightIndex, plan_weights, write_index, write_npu_weights
from draftwood.compiler.steps.step import Step
from draftwood.compiler.steps.tracing import shapes_only, trace
from draftwood.compiler.targets.precision import BF16, FP16, Precision, w8a8
from draftwood.compiler.targets.steps import accept_steps, draft_steps, static_steps
from draftwood.compiler.targets.target import Lowering, Target
from draftwood.compiler.teachers.config import TeacherConfig
from draftwood.errors import LoweringError, RequestError
from draftwood.versions import least_cann

INDEX_FILE = "npu/weights.json"
WEIGHTS_FILE = "npu/weights.bin"
# With one query row the fused attention may ignore its mask past 512 slots (vllm-project/vllm-ascend issue 15503);
# a second row, which nobody reads, costs nothing next to the weights.
DECODE_ROWS = 2


class GeTarget(Target):
    """Graphs for an Ascend NPU, lowered without ever holding the weights."""

    name = "ge"
    modes = ("copy", "link", "none")

    def precision(self, config: TeacherConfig) -> Precision:
        """The teacher's own type where the fused attention takes it, else bf16, which has fp32's range."""
        plain = FP16 if config.dtype == "float16" else BF16
        return w8a8(plain) if config.quantised else plain

    def check(self, precision: Precision) -> None:
        types = precision.types
        used = {precision.plain, types.activations, types.caches}
        if len(used) > 1 or not used <= {"float16", "bfloat16"}:
            raise RequestError(
                f"precision {types.name}: keeps numbers in {', '.join(sorted(used))}; the fused attention of an NPU"
                " takes one of float16 and bfloat16 for all"
            )

    def lower(self, lowering: Lowering) -> m.GraphSet:
        """Writes ``npu/``.

        Raises:
            LoweringError: a step has an operator without a converter, copies a cache, or breaks a rule of the fused
                attention.
        """
        (lowering.folder / "npu").mkdir()
        index = _plan(lowering)
        write_index(lowering.folder / INDEX_FILE, index)
        with shapes_only(lowering.precision.weights) as mode:
            modules = lowering.modules()
        types, asked = lowering.precision.types, lowering.shapes
        sizes = asked.sizes(types.activations, least_rows=DECODE_ROWS)
        steps = static_steps(asked, sizes, modules[0], decode_rows=DECODE_ROWS, form="npu")
        steps += accept_steps(asked, sizes, modules[0], lowering.drafter, decode_rows=DECODE_ROWS)
        graphs, used = [], set[str]()
        for step in [*steps, *draft_steps(asked, sizes, lowering.drafter, modules, static=True)]:
            lowering.progress(f"npu {step.signature.name}")
            graph, operators = _lower(lowering.folder, step, index, mode)
            graphs.append(graph)
            used |= operators
        (lowering.folder / "npu" / "atc.sh").write_text(atc_script([graph.file for graph in graphs], lowering.soc))
        if lowering.mode != "none":
            lowering.progress("npu weights")
            _write(lowering, index)
        return m.GraphSet(
            target=self.name,
            rank=0,
            ranks=1,
            precision=types,
            weights=WEIGHTS_FILE,
            index=INDEX_FILE,
            soc=lowering.soc,
            graphs=tuple(graphs),
            needs={"cann": least_cann(used), "torch_npu": version("torch_npu")},
        )


def _plan(lowering: Lowering) -> WeightIndex:
    entries, dtype = lowering.weights, lowering.precision.weights
    return plan_weights(
        {e.name: e.shape for e in entries},
        dtype,
        Path(WEIGHTS_FILE).name,
        {e.name: e.parts for e in entries},
        _linked(lowering) if lowering.mode == "link" else {},
        {e.name: e.dtype for e in entries if e.dtype not in (None, dtype)},
    )


def _linked(lowering: Lowering) -> dict[str, tuple[Path, int]]:
    """Weights that the teacher's files hold just as they are needed: one tensor, of the right type."""
    if not lowering.precision.keeps(lowering.config.dtype):
        return {}
    held = lowering.held
    return {
        e.name: (held[e.parts[0]].file.resolve(), byte_offset(held[e.parts[0]].file, e.parts[0]))
        for e in lowering.weights
        if len(e.parts) == 1 and e.parts[0] in held
    }


def _write(lowering: Lowering, index: WeightIndex) -> None:
    """The weights file; those that stay in the checkpoint's are read as well, to be checked."""
    reads = {e.name: e.read for e in lowering.weights}
    write_npu_weights(lowering.folder / WEIGHTS_FILE, index, lambda name: reads[name]())
    for name, constant in index.constants.items():
        if constant.location != Path(WEIGHTS_FILE).name:
            reads[name]()


def _lower(folder: Path, step: Step, index: WeightIndex, mode: FakeTensorMode) -> tuple[m.GraphSignature, set[str]]:
    """The step's signature with its file, and the operators of its graph."""
    signature = step.signature
    with mode:
        program = trace(step)
    air = folder / "npu" / f"{signature.name}.air"
    air.write_bytes(lower_to_ge(step, program, index))
    graph = Graph.load(air)
    prove_in_place(graph, signature)
    errors = [f for f in check_constraints(graph, shapes(graph)) if f.level == "error"]
    if errors:
        first = errors[0]
        raise LoweringError(
            f"step {signature.name}: {first.node}: {first.rule}: {first.message} ({first.source});"
            f" {len(errors)} such in all"
        )
    air.with_suffix(".txt").write_text(graph.text())
    return msgspec.structs.replace(signature, file=f"npu/{signature.name}.air"), {*graph.counts()}
