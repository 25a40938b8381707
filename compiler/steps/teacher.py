"""Common parts of the teacher's steps: the module around the decoder, and the sizes of their signatures."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from draftwood.compiler.steps.step import StepSizes
from draftwood.compiler.teachers.block import Form
from draftwood.compiler.teachers.config import TeacherConfig
from draftwood.compiler.teachers.decoder import Decoder, StepOutput
from draftwood.contract import Sizes
from draftwood.manifest import TokenRows

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


def static_caches(buffers: Iterable[TokenRows], slots: int, form: Form = "fused") -> dict[str, tuple[int, int]]:
    """Shapes of a static step's caches by name: one row a token in the NPU's form, else flat, head by head."""
    by_token = form == "npu"
    return {
        rows.name: (slots, rows.heads * rows.width) if by_token else (rows.heads * slots, rows.width)
        for rows in buffers
    }


def any_caches(buffers: Iterable[TokenRows]) -> dict[str, tuple[int | str, ...]]:
    """Shapes by name of the caches of a step of any size, which have a KV length C."""
    return {rows.name: (1, rows.heads, "C", rows.width) for rows in buffers}


def teacher_sizes(decoder: Decoder, rows: int | str = "R", all_rows: int | str = "T") -> Sizes:
    """The sizes of a step's results: logits and choices of ``rows`` rows, and the features that a drafter reads.
    Features from inside the teacher are of all rows."""
    width = {"V": decoder.config.vocabulary, "W": decoder.feature_width}
    return {"R": rows, "X": all_rows if decoder.aux_layers else rows, **width}


def commit_sizes(config: TeacherConfig, sizes: StepSizes) -> Sizes:
    """The sizes of what a static step moves from the branch into the caches before it writes its own rows."""
    return {"P": sizes.path_rows, "J": branch_shape(config, sizes.branch_rows)}


def branch_shape(config: TeacherConfig, rows: int) -> tuple[int, ...]:
    """A branch of so many rows of every cache."""
    return (config.layers, 2, rows, config.kv_heads, config.head_dim)
