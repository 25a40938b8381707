"""The matrices that ``--precision`` rounds for a teacher with plain numbers, and the bits of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from draftwood.compiler.checkpoints.blocks import BLOCK, rounded_to_eight, rounded_to_four
from draftwood.compiler.checkpoints.packed import Grouped
from draftwood.compiler.checkpoints.weight import Shape
from draftwood.compiler.teachers.checkpoint import Checkpoint
from draftwood.compiler.teachers.quantised import linear_layers
from draftwood.compiler.teachers.reader import WholeMatrix

HEAD = "lm_head"
# Layers of a block. Experts are not rounded, nor are routers, whose numbers choose experts.
_LAYERS = ("qkv", "o", "gate_up", "down", HEAD)


@dataclass(frozen=True, slots=True)
class RoundedMatrix:
    """A `draftwood.compiler.teachers.reader.WholeMatrix` that a matrix of plain numbers is rounded to."""

    module: str
    shape: Shape
    bits: Literal[4, 8]
    title: ClassVar[str] = "rounded"
    rounds: ClassVar[bool] = True

    @property
    def groups(self) -> int:
        return self.shape[1] // BLOCK

    @property
    def middle(self) -> bool:
        return self.bits == 8

    @property
    def minimum(self) -> bool:
        return self.bits == 4


def rounded_layers(checkpoint: Checkpoint) -> list[str]:
    """Our names of the linear layers that are rounded if their numbers are plain, the output matrix among them."""
    quantised = checkpoint.config.quantised
    return [
        name for name in linear_layers(checkpoint.parts) if name.rpartition(".")[2] in _LAYERS and name not in quantised
    ]


def whole_matrices(checkpoint: Checkpoint, bits: Literal[4, 8]) -> Mapping[str, WholeMatrix]:
    """Matrices that are packed in the files or rounded here to blocks of 32 inputs, by published names. The output
    matrix gets eight bits. So does every matrix that the publisher of a packed teacher left unpacked."""
    matrices = dict[str, WholeMatrix](checkpoint.packed)
    for layer in rounded_layers(checkpoint):
        width: Literal[4, 8] = 8 if layer == HEAD or checkpoint.packed else bits
        for name, shape in checkpoint.parts[f"{layer}.weight"].tensors:
            if name not in matrices and not shape[1] % BLOCK:
                matrices[name] = RoundedMatrix(name.rpartition(".")[0], shape, width)
    return matrices


def grouped(checkpoint: Checkpoint, name: str, matrix: WholeMatrix) -> Grouped:
    """The whole numbers of one of them; a matrix of plain numbers is read and rounded now."""
    if not isinstance(matrix, RoundedMatrix):
        return checkpoint.grouped(name)
    return (rounded_to_four if matrix.bits == 4 else rounded_to_eight)(checkpoint.tensor(name))
