"""One step of any size: prefill, decode and verify in one graph with run-time shapes, for a CPU."""

from __future__ import annotations

from draftwood.compiler.steps.step import Step, cached, tensor
from draftwood.compiler.steps.teacher import TeacherStep, teacher_outputs
from draftwood.compiler.teachers.decoder import Decoder
from draftwood.manifest import cache_names

# T rows, P path slots, B branch rows, R rows with logits, C slots, S seen slots, W = P + T


class CpuStep(TeacherStep):
    """Prefill, decode and verify of any size in one graph with run-time shapes, for onnxruntime."""

    def forward(self, tokens, positions, rows, bias, last, total, path, branch, *caches):  # type: ignore[no-untyped-def]
        out = self.decoder.step_cpu(tokens, positions, rows, bias, last, total, path, branch, list(caches))
        return (out.logits_RV, out.choice_R, out.features_RF, out.branch_L2TKD, *out.caches)


def cpu_step(decoder: Decoder, dtype: str = "float32") -> Step:
    """The one graph with run-time sizes that onnxruntime serves every gear with."""
    config = decoder.config
    shape = (config.layers, 2, "B", config.kv_heads, config.head_dim)
    inputs = [
        tensor("tokens", "int64", "T"),
        tensor("positions", "int64", "T"),
        tensor("rows", "int64", "R"),
        tensor("bias", dtype, 1, 1, "W", "S"),
        tensor("last", "int32", 1),
        tensor("total", "int32"),
        tensor("path", "int64", "P"),
        tensor("branch", dtype, *shape),
    ]
    outputs = [*teacher_outputs(decoder, "R", "T", dtype), tensor("branch.out", dtype, *shape[:2], "T", *shape[3:])]
    caches, cache = cache_names(config.layers), (1, config.kv_heads, "C", config.head_dim)
    signature = cached(caches, "step", "step", inputs, outputs, cache, 0, 0, dtype)
    # Examples are distinct and above 1, so that torch.export ties no two sizes and specialises none.
    dynamic = {"T": 5, "R": 4, "P": 3, "B": 6, "W": 8, "S": 40, "C": 128}
    return Step(CpuStep(decoder, "cpu", 0), signature, dynamic)
