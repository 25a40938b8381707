"""The ``onnx`` folder of a bundle: the graphs that onnxruntime runs, and their weights."""

from __future__ import annotations

from pathlib import Path

from draftwood import manifest as m
from draftwood.compiler.onnx.weights import write_weights
from draftwood.compiler.steps.any_size import cpu_step, grouped_step
from draftwood.compiler.steps.bitwise import bitwise_step
from draftwood.compiler.steps.short import ShortStep, Unlike, shortened
from draftwood.compiler.steps.step import Step, StepSizes
from draftwood.compiler.steps.tracing import trace
from draftwood.compiler.targets.modules import load_modules
from draftwood.compiler.targets.steps import Shapes, draft_steps, static_steps
from draftwood.compiler.targets.storage import FP32, Storage, nbits, w8a8
from draftwood.compiler.targets.target import Lowering, Target
from draftwood.compiler.teachers.config import TeacherConfig
from draftwood.compiler.teachers.decoder import Decoder
from draftwood.contract import texts_signature
from draftwood.errors import RequestError

FOLDER = "onnx"
WEIGHTS_FILE = f"{FOLDER}/weights.safetensors"
# Rows of the trees that a launch drafts for several texts: with more a CPU computes for longer than it reads weights,
# and drafts share nothing.
SHARED_ROWS = 32


class OnnxTarget(Target):
    """Graphs with run-time sizes that a CPU serves every gear with, and static graphs of every gear."""

    name = "onnx"
    modes = ("copy",)

    def precision(self, config: TeacherConfig) -> Storage:
        if config.packed:
            return nbits(FP32)
        return w8a8(FP32) if config.quantised else FP32

    def check_installed(self) -> None:
        """They are imported with this file."""

    def check(self, precision: Storage) -> None:
        types = precision.types
        if {precision.plain, types.activations, types.caches} != {"float32"}:
            raise RequestError(
                f"precision {types.name}: keeps numbers in other types than float32; ONNX graphs compute in float32"
                " alone; choose another target"
            )

    def lower(self, lowering: Lowering) -> tuple[m.GraphSet, ...]:
        # An NPU's machine need not have ONNX.
        from draftwood.compiler.onnx.layouts import lay_out
        from draftwood.compiler.onnx.lowering import lower_to_onnx

        lowering.progress("weights")
        file = lowering.folder / WEIGHTS_FILE
        file.parent.mkdir()
        spans = write_weights(file, lowering.weights)
        modules = load_modules(file, lowering.config, lowering.drafter)
        types = lowering.precision.types
        shapes, sizes = lowering.shapes, lowering.shapes.sizes(types.activations)
        steps = self._teacher_steps(shapes, modules[0], sizes)
        short = shortened(modules[0])
        cut = self._teacher_steps(shapes, short.decoder, sizes) if short else []
        shorts = {step.signature.name: ShortStep(short, step) for step in cut if short}
        drafts = [draft_steps(shapes, sizes, lowering.drafter, modules, static) for static in (False, True)]
        # A drafter without caches has the same step in both.
        steps += {step.signature.name: step for both in drafts for step in both}.values()
        signatures = list[m.StepSignature]()
        for step in steps:
            signature = step.signature
            lowering.progress(signature.name)
            several = [texts_signature(signature, texts) for texts in shapes.batches if _shares(signature, texts)]
            path, traced = lowering.folder / FOLDER / f"{signature.name}.onnx", shorts.get(signature.name)
            rest = spans, Path(WEIGHTS_FILE).name, path, several
            try:
                lower_to_onnx(step, trace(traced.step if traced else step), *rest, traced)
            except Unlike:  # the trace of all blocks is right for any blocks
                lower_to_onnx(step, trace(step), *rest)
            signatures += [signature, *several]
        lowering.progress("layouts")
        # Graphs of fixed sizes are read by other compilers as well, and are run here to compare with alone.
        lay_out(file, [file.with_name(f"{step.name}.onnx") for step in signatures if not step.slots])
        graphs = m.GraphSet(
            target=self.name,
            rank=0,
            ranks=1,
            precision=types,
            weights=WEIGHTS_FILE,
            index=None,
            soc=None,
            graphs=tuple(s.frozen_in(f"{FOLDER}/{s.name}.onnx") for s in signatures),
        )
        return (graphs,)

    def _teacher_steps(self, shapes: Shapes, decoder: Decoder, sizes: StepSizes) -> list[Step]:
        """With run-time sizes, and static."""
        steps = [form(decoder, sizes.dtype) for form in (cpu_step, grouped_step)]
        steps += static_steps(shapes, sizes, decoder)
        return steps + [bitwise_step(decoder, sizes.dtype)] * shapes.bitwise


def _shares(step: m.StepSignature, texts: int) -> bool:
    """Whether there is a graph that steps or drafts for that many texts: no draft if their trees have many rows."""
    nodes = next((spec.shape[0] for spec in step.outputs if spec.name == "drafted"), 0)
    drafts = step.kind == "draft" and not step.slots and texts * (int(nodes) + 1) <= SHARED_ROWS
    return drafts or step.kind == "grouped"
