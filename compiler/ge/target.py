"""The ``npu`` folder of a bundle: every step as an ``.air`` file that has been proved and checked."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from draftwood import manifest as m
from draftwood.compiler.bundle.build import BuildRequest, Progress, Sources, draft_steps, static_steps
from draftwood.compiler.checkpoints.safetensors_file import byte_offset
from draftwood.compiler.checkpoints.weight import WeightEntry
from draftwood.compiler.ge.atc import atc_script
from draftwood.compiler.ge.constraints import check_constraints
from draftwood.compiler.ge.graph import Graph
from draftwood.compiler.ge.interpreter import shapes
from draftwood.compiler.ge.lowering import lower_to_ge
from draftwood.compiler.ge.proofs import prove_in_place
from draftwood.compiler.ge.weights import WeightIndex, plan_weights, write_index, write_npu_weights
from draftwood.compiler.steps.step import Step, StepSizes
from draftwood.compiler.steps.tracing import shapes_only, trace
from draftwood.errors import LoweringError

INDEX_FILE = "npu/weights.json"
WEIGHTS_FILE = "npu/weights.bin"
# With one query row the fused attention may ignore its mask past 512 slots (vllm-project/vllm-ascend issue 15503);
# a second row, which nobody reads, costs nothing next to the weights.
DECODE_ROWS = 2


def lower_for_npu(folder: Path, request: BuildRequest, sources: Sources, progress: Progress) -> m.NpuTarget:
    """Writes ``npu/`` of the bundle ``folder``, without ever holding the weights.

    Raises:
        LoweringError: a step has an operator without a converter, copies a cache, or breaks a rule of the fused
            attention.
    """
    (folder / "npu").mkdir()
    dtype = _dtype(sources)
    positions = max(request.slots)
    entries = sources.weights(positions)
    linked = _linked(sources, entries, dtype) if request.weights == "link" else {}
    index = plan_weights(
        {e.name: e.shape for e in entries},
        getattr(torch, dtype),
        Path(WEIGHTS_FILE).name,
        {e.name: e.parts for e in entries},
        linked,
        {e.name: e.dtype for e in entries if e.dtype is not None},
    )
    write_index(folder / INDEX_FILE, index)
    with shapes_only(getattr(torch, dtype)) as mode:
        modules = sources.modules(positions)
    sizes = request.sizes
    sizes = StepSizes(branch_rows=max(DECODE_ROWS, sizes.branch_rows), path_rows=sizes.path_rows, dtype=dtype)
    graphs = []
    steps = static_steps(request, sizes, modules[0], decode_rows=DECODE_ROWS)
    for step in [*steps, *draft_steps(request, sizes, sources.kind, modules, static=True)]:
        progress(f"npu {step.signature.name}")
        graphs.append(_lower(folder, step, index, mode))
    (folder / "npu" / "atc.sh").write_text(atc_script([graph.file for graph in graphs], request.soc))
    if request.weights != "none":
        progress("npu weights")
        reads = {e.name: e.read for e in entries}
        write_npu_weights(folder / WEIGHTS_FILE, index, lambda name: reads[name]())
    return m.NpuTarget(dtype=dtype, soc=request.soc, index=INDEX_FILE, weights=WEIGHTS_FILE, graphs=tuple(graphs))


def _dtype(sources: Sources) -> Literal["float16", "bfloat16"]:
    """The teacher's own type where the fused attention takes it, else bf16, which has fp32's range."""
    return "float16" if sources.teacher.config.dtype == "float16" else "bfloat16"


def _linked(sources: Sources, entries: list[WeightEntry], dtype: str) -> dict[str, tuple[Path, int]]:
    """Weights that the teacher's files hold just as they are needed: one tensor, of the right type."""
    if sources.teacher.config.dtype != dtype:
        return {}
    held = sources.teacher.entries
    return {
        e.name: (held[e.parts[0]].file.resolve(), byte_offset(held[e.parts[0]].file, e.parts[0]))
        for e in entries
        if len(e.parts) == 1 and e.parts[0] in held
    }


def _lower(folder: Path, step: Step, index: WeightIndex, mode: FakeTensorMode) -> m.GraphSignature:
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
    return msgspec.structs.replace(signature, file=f"npu/{signature.name}.air")


__all__ = ["DECODE_ROWS", "INDEX_FILE", "WEIGHTS_FILE", "lower_for_npu"]
