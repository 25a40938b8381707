"""The ``onnx`` folder of a bundle: what onnxruntime runs, and its weights beside it."""

from __future__ import annotations

from pathlib import Path

from draftwood import manifest as m
from draftwood.compiler.onnx.lowering import lower_to_onnx
from draftwood.compiler.onnx.weights import write_weights
from draftwood.compiler.steps.any_size import cpu_step
from draftwood.compiler.steps.bitwise import bitwise_step
from draftwood.compiler.steps.tracing import trace
from draftwood.compiler.targets.modules import load_modules
from draftwood.compiler.targets.steps import draft_steps, static_steps
from draftwood.compiler.targets.storage import FP32, Storage, w8a8
from draftwood.compiler.targets.target import Lowering, Target
from draftwood.compiler.teachers.config import TeacherConfig
from draftwood.errors import RequestError

FOLDER = "onnx"
WEIGHTS_FILE = f"{FOLDER}/weights.safetensors"


class OnnxTarget(Target):
    """One graph with run-time sizes that a CPU serves every gear with, and a static graph a gear."""

    name = "onnx"
    modes = ("copy",)

    def precision(self, config: TeacherConfig) -> Storage:
        return w8a8(FP32) if config.quantised else FP32

    def check(self, precision: Storage) -> None:
        types = precision.types
        if {precision.plain, types.activations, types.caches} != {"float32"}:
            raise RequestError(
                f"precision {types.name}: keeps numbers in other types than float32; ONNX graphs compute in float32"
                " alone; choose another target"
            )

    def lower(self, lowering: Lowering) -> tuple[m.GraphSet, ...]:
        lowering.progress("weights")
        file = lowering.folder / WEIGHTS_FILE
        file.parent.mkdir()
        spans = write_weights(file, lowering.weights)
        modules = load_modules(file, lowering.config, lowering.drafter)
        types = lowering.precision.types
        shapes, sizes = lowering.shapes, lowering.shapes.sizes(types.activations)
        steps = [cpu_step(modules[0], types.activations), *static_steps(shapes, sizes, modules[0])]
        steps += [cpu_step(modules[0], types.activations, texts) for texts in shapes.batches]
        steps += [bitwise_step(modules[0], types.activations)] * shapes.bitwise
        steps += draft_steps(shapes, sizes, lowering.drafter, modules, static=False)
        signatures = [step.signature.frozen_in(f"{FOLDER}/{step.signature.name}.onnx") for step in steps]
        for step, signature in zip(steps, signatures, strict=True):
            lowering.progress(signature.name)
            path = lowering.folder / signature.file
            lower_to_onnx(step, trace(step), spans, Path(WEIGHTS_FILE).name, path)
        graphs = m.GraphSet(
            target=self.name,
            rank=0,
            ranks=1,
            precision=types,
            weights=WEIGHTS_FILE,
            index=None,
            soc=None,
            graphs=tuple(signatures),
        )
        return (graphs,)
