"""Steps of any size on a CPU: prefill, decode and verify in one graph with run-time shapes.

One form has all query heads of a row next to each other. The grouped form has those that share keys as rows, so that
few rows of a long text read its keys once instead of once for each head. Rows have the same bits in both. Several texts
share a launch of a graph that `draftwood.compiler.onnx.texts` makes of the grouped form. The bound buffers say which
texts; nothing is copied. A text may have as many rows as it likes.
"""

from __future__ import annotations

from typing import Literal

from draftwood.compiler.steps.step import Step, signed
from draftwood.compiler.steps.teacher import TeacherStep, any_caches, teacher_sizes
from draftwood.compiler.teachers.block import Appended
from draftwood.compiler.teachers.decoder import Decoder

# T new rows, A of them in attention, C slots, S seen slots, R rows with logits

# Examples are distinct and above 1, so that torch.export ties no two sizes and specialises none.
_EXAMPLES = {"R": 4, "T": 5, "A": 6, "S": 40, "C": 128}


class CpuStep(TeacherStep):
    """A step of either form, for onnxruntime."""

    def forward(self, rows, tokens, queries, results, positions, bias, last, total, *caches):  # type: ignore[no-untyped-def]
        appended = Appended(queries, results, positions, bias, last, total)
        return self.outputs(self.decoder.step_cpu(tokens, rows, appended, caches), branch=False)


def cpu_step(decoder: Decoder, dtype: str = "float32") -> Step:
    """The step for prompts and large trees."""
    return _step("step", decoder, dtype)


def grouped_step(decoder: Decoder, dtype: str = "float32") -> Step:
    """The step for few rows, with query heads as rows."""
    return _step("grouped", decoder, dtype)


def _step(kind: Literal["step", "grouped"], decoder: Decoder, dtype: str) -> Step:
    config = decoder.config
    sizes = {**teacher_sizes(decoder), "E": 3 * config.kv_heads, "Q": config.heads}
    signature = signed(kind, kind, sizes, any_caches(config.buffers), dtype=dtype)
    return Step(CpuStep(decoder, "cpu", 0), signature, dict(_EXAMPLES))
