"""Medusa heads in training (Medusa-1; Cai et al., 2024): the loss is plain cross-entropy, 0.8^i a head.

With shared noise it is the cross-entropy with the teacher's distribution, and on sampled text with its draw. A step
then looks at some of the vocabulary's ids alone, since otherwise each head would read the whole output matrix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from draftwood.compiler.drafters.medusa.checkpoint import MedusaCheckpoint
from draftwood.compiler.drafters.medusa.network import Head, MedusaHeads
from draftwood.compiler.training.batch import Batch
from draftwood.compiler.training.student import Student, write_folder

if TYPE_CHECKING:
    from draftwood.compiler.training.teacher import FrozenTeacher

# N contexts, I heads, H hidden size

# Random ids that a step's cross-entropy covers in addition to its texts' ids.
_NEGATIVES = 4096


class MedusaStudent(Student):
    """Residual blocks on the teacher's final state; new heads share its output matrix, others may have their own."""

    def __init__(
        self, teacher: FrozenTeacher, heads: int, blocks: int, tied: bool = True, bias: bool = True,
        ids_V: Tensor | None = None,
    ) -> None:  # fmt: skip
        super().__init__(teacher, heads, (), ids_V)
        self.blocks, self.teacher_name = blocks, teacher.checkpoint.path.resolve().name
        self.model = MedusaHeads(self.output_VH.shape[1], len(self.output_VH), heads, blocks, tied, bias)

    def shape(self) -> dict[str, Any]:
        return {**super().shape(), "layers": self.blocks}

    @property
    def heads(self) -> Sequence[Head]:
        return cast(Sequence[Head], self.model.heads)

    def start_from(self, teacher: FrozenTeacher) -> None:
        """Begins as the teacher's own head: blocks that change nothing."""
        for head in self.heads:
            for block in cast(Sequence[nn.Linear], head.blocks):
                torch.nn.init.zeros_(block.weight)
                torch.nn.init.zeros_(block.bias)

    def output(self, level: int) -> Tensor:
        return self.output_VH if self.model.tied else self.heads[level].out.weight

    def features(self, batch: Batch) -> Tensor:
        hidden_NH = batch.pick(batch.last_BSH).float()
        return torch.stack([head.features(hidden_NH) for head in self.heads], 1)

    def losses(self, batch: Batch, features_NIH: Tensor, weight_NI: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        of = self.distribution_loss if self.shared_noise else self.token_loss
        loss, nats_I = of(batch, features_NIH, weight_NI)
        return loss, {"nats": nats_I}

    def save(self, folder: Path) -> None:
        """medusa_lm_head.safetensors with config.json, as FasterDecoding/Medusa names them."""
        tensors = {}
        for i, head in enumerate(self.heads):
            for j, block in enumerate(head.blocks):
                tensors[f"{i}.{j}.linear.weight"], tensors[f"{i}.{j}.linear.bias"] = block.weight, block.bias
        config = {
            "medusa_num_heads": self.levels, "medusa_num_layers": self.blocks,
            "base_model_name_or_path": self.teacher_name,
        }  # fmt: skip
        write_folder(folder, tensors, config, "medusa_lm_head.safetensors")


def begin(teacher: FrozenTeacher, options: Mapping[str, Any], ids_V: Tensor | None) -> MedusaStudent:
    """A student of the chosen heads and blocks."""
    student = MedusaStudent(teacher, options["levels"], options["layers"])
    student.negatives, student.shared_noise = _NEGATIVES, options["shared_noise"]
    return student


def read_back(
    opened: MedusaCheckpoint, teacher: FrozenTeacher, levels: int | None
) -> tuple[MedusaStudent, dict[str, Tensor]]:
    """Heads as a student, and their values."""
    config = opened.config
    student = MedusaStudent(teacher, config.heads, config.blocks, config.tied, config.bias, opened.ids)
    return student, {f"model.{name}": opened.weight(name) for name in opened.names()}
