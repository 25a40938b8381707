"""Common parts of the teacher's steps: the module around the decoder, and the parts of their signatures."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from draftwood.compiler.steps.step import StepSizes, tensor
from draftwood.compiler.teachers.block import Form
from draftwood.compiler.teachers.config import TeacherConfig
from draftwood.compiler.teachers.decoder import Decoder, StepOutput
from draftwood.manifest import TensorSignature

# T rows, L layers, K key/value heads, D head dimension


class TeacherStep(nn.Module):
    """Runs the decoder in one form of its attention; pads the branch to ``branch_rows``."""

    def __init__(self, decoder: Decoder, form: Form, branch_rows: int) -> None:
        super().__init__()
        self.decoder, self.form, self.branch_rows = decoder, form, branch_rows

    def outputs(self, out: StepOutput, branch: bool) -> tuple[Tensor, ...]:
        """The step's results, in the order of its signature."""
        tail = (self._padded(out.branch_L2TKD),) if branch else ()
        return (out.logits_RV, out.choice_R, out.features_RF, *tail, *out.caches)

    def _padded(self, branch_L2TKD: Tensor) -> Tensor:
        missing = self.branch_rows - branch_L2TKD.shape[2]
        if missing <= 0:
            return branch_L2TKD
        layers, two, _, heads, dim = branch_L2TKD.shape
        return torch.cat((branch_L2TKD, branch_L2TKD.new_zeros(layers, two, missing, heads, dim)), 2)


def cache_shape(config: TeacherConfig, slots: int, form: Form) -> tuple[int, int]:
    """A cache of a static step: one row a token in the NPU's form, else flat, head by head."""
    kv_heads, dim = config.kv_heads, config.head_dim
    return (slots, kv_heads * dim) if form == "npu" else (kv_heads * slots, dim)


def commit_inputs(config: TeacherConfig, sizes: StepSizes) -> list[TensorSignature]:
    """The rows that a static step moves from the branch into the caches before it writes its own rows."""
    branch = (config.layers, 2, sizes.branch_rows, config.kv_heads, config.head_dim)
    return [
        tensor("committed", "int64", 1),
        tensor("accepted", "int64", 1),
        tensor("path", "int64", sizes.path_rows),
        tensor("branch", sizes.dtype, *branch),
    ]


def teacher_outputs(
    decoder: Decoder, rows: int | str, all_rows: int | str, dtype: str = "float32"
) -> list[TensorSignature]:
    """Logits and choices of ``rows`` rows, and the features that the drafter reads."""
    return [
        tensor("logits", dtype, rows, decoder.config.vocabulary),
        tensor("choice", "int64", rows),
        tensor("features", dtype, all_rows if decoder.aux_layers else rows, decoder.feature_width),
    ]
