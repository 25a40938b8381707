"""One step of any size on a CPU: prefill, decode and verify in one graph with run-time shapes.

Several texts share a launch of a graph that `draftwood.compiler.onnx.texts` makes of it: which texts is a question of
what is bound, and nothing is copied. A text may have as many rows as it likes.
"""

from __future__ import annotations

from draftwood.compiler.steps.step import Step, cached, tensor
from draftwood.compiler.steps.teacher import TeacherStep, teacher_outputs
from draftwood.compiler.teachers.block import Appended
from draftwood.compiler.teachers.decoder import Decoder
from draftwood.manifest import cache_names

# T rows, P path slots, B branch rows, C slots, S seen slots, W = P + T; R rows with logits

# Examples are distinct and above 1, so that torch.export ties no two sizes and specialises none.
_EXAMPLES = {"R": 4, "T": 5, "P": 3, "B": 6, "W": 8, "S": 40, "C": 128}


class CpuStep(TeacherStep):
    """Prefill, decode and verify of any size in one graph with run-time shapes, for onnxruntime."""

    def forward(self, rows, tokens, positions, bias, last, total, path, branch, *caches):  # type: ignore[no-untyped-def]
        appended = Appended(positions, bias, last, total)
        out = self.decoder.step_cpu(tokens, rows, path, branch, appended, caches)
        return (out.logits_RV, out.choice_R, out.features_RF, out.branch_L2TKD, *out.caches)


def cpu_step(decoder: Decoder, dtype: str = "float32") -> Step:
    """The graph with run-time sizes that onnxruntime serves every gear with."""
    config = decoder.config
    shape = (config.layers, 2, "B", config.kv_heads, config.head_dim)
    inputs = [
        tensor("rows", "int64", "R"),
        tensor("tokens", "int64", "T"),
        tensor("positions", "int64", "T"),
        tensor("bias", dtype, 1, 1, "W", "S"),
        tensor("last", "int32", 1),
        tensor("total", "int32"),
        tensor("path", "int64", "P"),
        tensor("branch", dtype, *shape),
    ]
    outputs = [*teacher_outputs(decoder, "R", "T", dtype), tensor("branch.out", dtype, *shape[:2], "T", *shape[3:])]
    cache = (1, config.kv_heads, "C", config.head_dim)
    signature = cached(cache_names(config.layers), "step", "step", inputs, outputs, cache, 0, 0, dtype)
    return Step(CpuStep(decoder, "cpu", 0), signature, dict(_EXAMPLES))
