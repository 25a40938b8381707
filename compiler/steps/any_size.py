"""One step of any size on a CPU: prefill, decode and verify in one graph with run-time shapes.

Several texts share a launch of a graph that `draftwood.compiler.onnx.texts` makes of it. The bound buffers say which
texts; nothing is copied. A text may have as many rows as it likes.
"""

from __future__ import annotations

from draftwood.compiler.steps.step import Step, signed
from draftwood.compiler.steps.teacher import TeacherStep, any_caches, teacher_sizes
from draftwood.compiler.teachers.block import Appended
from draftwood.compiler.teachers.decoder import Decoder

# T new rows, A of them in attention, C slots, S seen slots, R rows with logits

# Examples are distinct and above 1, so that torch.export ties no two sizes and specialises none.
_EXAMPLES = {"R": 4, "T": 5, "A": 6, "S": 40, "C": 128}


class CpuStep(TeacherStep):
    """Prefill, decode and verify of any size in one graph with run-time shapes, for onnxruntime."""

    def forward(self, rows, tokens, queries, results, positions, bias, last, total, *caches):  # type: ignore[no-untyped-def]
        appended = Appended(queries, results, positions, bias, last, total)
        return self.outputs(self.decoder.step_cpu(tokens, rows, appended, caches), branch=False)


def cpu_step(decoder: Decoder, dtype: str = "float32") -> Step:
    """The graph with run-time sizes that onnxruntime serves every gear with."""
    signature = signed("step", "step", teacher_sizes(decoder), any_caches(decoder.config.buffers), dtype=dtype)
    return Step(CpuStep(decoder, "cpu", 0), signature, dict(_EXAMPLES))
