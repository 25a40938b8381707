"""Matrices that are published as packed whole numbers of four or eight bits, in one form: (whole - zero) * scale.

The product in fp32 is exact for scales of 16 bits: 5 or 9 bits times 11. Rounded to the scale's type it has the bits
of compressed-tensors, auto-round and autoawq, which round at once. Layouts: autoawq (awq/utils/packing_utils.py),
gptqmodel (nn_modules/qlinear), compressed-tensors (compressors/pack_quantized).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from draftwood.compiler.checkpoints.safetensors_file import DTYPES, Entry, is_finite
from draftwood.compiler.checkpoints.weight import Shape
from draftwood.errors import CheckpointError

# O outputs, H inputs, G groups of inputs, R rows of words, W words, N numbers of a row of words

_WORD = 32
# The place in an AWQ word of its first output's number, of its second's, and so on.
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
_WORDS, _SCALES, _INDICES = ("I32",), tuple(DTYPES), ("I32", "I64")
_FETCH = "fetch the checkpoint again"


@dataclass(frozen=True, slots=True)
class Grouped:
    """A matrix of whole numbers: uint8 [O, H] below 2 ** ``bits``, zeros uint8 [O, G] and scales [O, G]. ``minimum_OG``
    float32, if there is one, is a group's smallest number; it is added to the product."""

    whole_OH: Tensor
    zero_OG: Tensor
    scale_OG: Tensor
    bits: int
    minimum_OG: Tensor | None = None

    def product(self) -> Tensor:
        """The matrix itself, float32 [O, H]."""
        steps_OGX = self.whole_OH.unflatten(1, (self.scale_OG.shape[1], -1)).float() - self.zero_OG[..., None].float()
        made_OGX = steps_OGX * self.scale_OG[..., None].float()
        return (made_OGX if self.minimum_OG is None else made_OGX + self.minimum_OG[..., None]).flatten(1)

    def in_eight_bits(self) -> Grouped:
        """Numbers of four bits in eight bits, centred on zero."""
        shift_OG = 128 - self.zero_OG
        shift_OH = shift_OG.repeat_interleave(self.whole_OH.shape[1] // shift_OG.shape[1], 1)
        middle_OG = torch.full_like(self.zero_OG, 128)
        return Grouped(self.whole_OH + shift_OH, middle_OG, self.scale_OG, 8, self.minimum_OG)


def unpacked(words_RW: Tensor, bits: int, numbers: int) -> Tensor:
    """uint8 [R, N] of int32 words, the lowest bits first."""
    rows, words, many = *words_RW.shape, _WORD // bits
    found_RWX = torch.empty(rows, words, many, dtype=torch.uint8)
    for place in range(many):
        found_RWX[..., place] = (words_RW >> (place * bits)) & ((1 << bits) - 1)
    return found_RWX.flatten(1)[:, :numbers]


def _words(numbers: int, bits: int) -> int:
    return -(-numbers * bits // _WORD)


@dataclass(frozen=True, kw_only=True, slots=True)
class Packing(ABC):
    """How a checkpoint packs its matrices; which of them are packed, its tensors say.

    Three values may differ between matrices: bits, inputs of a group (None: all of a row), and whether zeros are the
    middle. These are the values that the description names.
    """

    # Its usual name, for messages.
    title: str
    bits: tuple[int, ...]
    groups: tuple[int | None, ...]
    symmetric: tuple[bool, ...]

    # After a module's name, of the tensor whose presence says that it is packed.
    key: ClassVar[str]
    # The tensors among these that hold zeros.
    zeros: ClassVar[frozenset[str]] = frozenset({"qzeros"})
    # Tensors that may be there: their types as safetensors spells them.
    optional: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    @abstractmethod
    def tensors(self, shape: Shape, bits: int, groups: int) -> dict[str, tuple[Shape, tuple[str, ...]]]:
        """Shape and possible types of each tensor of a matrix [O, H], by the name after the module's. Those of
        ``optional`` are included."""

    @abstractmethod
    def grouped(self, matrix: PackedMatrix, tensors: Mapping[str, Tensor]) -> Grouped:
        """The matrix of its tensors."""


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A packed matrix of a checkpoint: its module's published name and, in ``tensors``, the names after it."""

    packing: Packing
    module: str
    shape: Shape
    bits: int
    groups: int
    tensors: tuple[str, ...]
    # Whether groups have a number that is added to theirs, and whether the whole numbers are rounded.
    minimum: ClassVar[bool] = False
    rounds: ClassVar[bool] = False

    @property
    def title(self) -> str:
        """How people call the packing."""
        return self.packing.title

    @property
    def middle(self) -> bool:
        """Whether its zeros are known to be the middle before they are read."""
        return False not in self.packing.symmetric or not self.packing.zeros & {*self.tensors}

    @property
    def shapes(self) -> dict[str, Shape]:
        """Published name -> shape of its tensors."""
        expected = self.packing.tensors(self.shape, self.bits, self.groups)
        return {f"{self.module}.{name}": expected[name][0] for name in self.tensors}

    def check_kinds(self, stored: Mapping[str, Entry]) -> None:
        """Raises CheckpointError if a tensor has another type than its layout."""
        expected = self.packing.tensors(self.shape, self.bits, self.groups)
        for name in self.tensors:
            entry, known = stored[f"{self.module}.{name}"], expected[name][1]
            if entry.kind not in known:
                raise CheckpointError(
                    f"{entry.file}: {self.module}.{name} has dtype {entry.kind}; expected {' or '.join(known)} of"
                    f" {self.packing.title}; {_FETCH}"
                )

    def read(self, tensor: Callable[[str], Tensor]) -> Grouped:
        """Its numbers, from a reader of published tensors; CheckpointError if they contradict each other."""
        grouped = self.packing.grouped(self, {name: tensor(f"{self.module}.{name}") for name in self.tensors})
        if not is_finite(grouped.scale_OG.float() * (1 << self.bits)):
            raise CheckpointError(
                f"{self.module}: a scale of {float(grouped.scale_OG.abs().max()):.6g}; expected numbers whose products"
                f" with {(1 << self.bits) - 1} are numbers too; {_FETCH}"
            )
        return grouped

    def fail(self, name: str, said: str) -> CheckpointError:
        return CheckpointError(f"{self.module}.{name}: {said}")

    def check_order(self, name: str, index_H: Tensor) -> None:
        """Raises CheckpointError if a group's inputs are not consecutive."""
        inputs = self.shape[1]
        if not torch.equal(index_H.long(), torch.arange(inputs) // (inputs // self.groups)):
            raise self.fail(
                name,
                f"groups inputs out of their order; expected {inputs // self.groups} consecutive ones in every group;"
                " quantise it with desc_act false or actorder 'weight', or take another version of it",
            )

    def check_zero(self, name: str, value: Tensor) -> None:
        """CheckpointError if a tensor that the family does not have is more than zeros."""
        if bool(value.any()):
            raise self.fail(name, "is not all zeros; expected no such tensor, or zeros, in this family")


def packed_matrices(
    packing: Packing, shapes: Mapping[str, Shape], stored: Mapping[str, Entry]
) -> dict[str, PackedMatrix]:
    """The packed matrices by the published names of the plain tensors in ``shapes`` that they replace.

    Raises:
        CheckpointError: there is none, or one does not divide into words and groups.
    """
    matrices = {}
    for name, shape in shapes.items():
        module, _, kind = name.rpartition(".")
        key = f"{module}.{packing.key}"
        if kind == "weight" and len(shape) == 2 and name not in stored and key in stored:
            matrices[name] = _fitting(packing, module, shape, stored, frozenset(shapes))
    if not matrices:
        raise CheckpointError(
            f"the description says {packing.title}, but no linear layer has a tensor {packing.key}; {_FETCH}"
        )
    return matrices


def described_matrices(packing: Packing, layers: Mapping[str, Shape]) -> dict[str, PackedMatrix]:
    """Packed matrices from a description without files, one for each of ``layers``; with zeros if it speaks of
    asymmetric ones.

    Raises:
        CheckpointError: one does not divide into words and groups.
    """
    matrices, zeros = {}, packing.zeros if False in packing.symmetric else frozenset()
    for name, shape in layers.items():
        matrix = _fitting(packing, name.rpartition(".")[0], shape, {}, frozenset())
        matrices[name] = replace(matrix, tensors=tuple(dict.fromkeys((*matrix.tensors, *sorted(zeros)))))
    return matrices


def _fitting(
    packing: Packing, module: str, shape: Shape, stored: Mapping[str, Entry], expected: frozenset[str]
) -> PackedMatrix:
    """The matrix with the description's bits and groups that fit the stored tensors; the first choice if none fit."""
    inputs = shape[1]
    groups = [1 if group is None else inputs // group for group in packing.groups if not group or not inputs % group]
    if not groups or inputs * min(packing.bits) % _WORD:
        raise CheckpointError(f"{module}: {inputs} inputs do not divide into words and groups of {packing.groups}")
    choices = []
    for bits in packing.bits:
        for count in groups:
            tensors = packing.tensors(shape, bits, count)
            there = [name for name in tensors if f"{module}.{name}" in stored and f"{module}.{name}" not in expected]
            names = tuple(name for name in tensors if name not in packing.optional or name in there)
            choices.append(PackedMatrix(packing, module, shape, bits, count, names))
    fits = (c for c in choices if all(n in stored and stored[n].shape == shape for n, shape in c.shapes.items()))
    return next(fits, choices[0])


class Awq(Packing):
    """autoawq's ``gemm``: words along outputs, interleaved; ``bits`` is always 4."""

    key = "qweight"
    optional: ClassVar[Mapping[str, tuple[str, ...]]] = {"bias": _SCALES}

    def tensors(self, shape: Shape, bits: int, groups: int) -> dict[str, tuple[Shape, tuple[str, ...]]]:
        outputs, inputs = shape
        words = _words(outputs, bits)
        return {
            "qweight": ((inputs, words), _WORDS),
            "qzeros": ((groups, words), _WORDS),
            "scales": ((groups, outputs), _SCALES),
            "bias": ((outputs,), _SCALES),
        }

    def grouped(self, matrix: PackedMatrix, tensors: Mapping[str, Tensor]) -> Grouped:
        if "bias" in tensors:
            matrix.check_zero("bias", tensors["bias"])
        whole, zero = (self._outputs(tensors[name], matrix) for name in ("qweight", "qzeros"))
        return Grouped(whole, zero, tensors["scales"].t(), matrix.bits)

    def _outputs(self, words_RW: Tensor, matrix: PackedMatrix) -> Tensor:
        """uint8 [O, R]."""
        numbers_RWX = unpacked(words_RW, matrix.bits, words_RW.shape[1] * 8).unflatten(1, (-1, 8))
        return numbers_RWX[..., list(_AWQ_PLACES)].flatten(1)[:, : matrix.shape[0]].t().contiguous()


@dataclass(frozen=True, kw_only=True, slots=True)
class Gptq(Packing):
    """Words of weights along inputs, words of zeros along outputs."""

    # v1 stores every zero less one.
    less_one: bool

    key = "qweight"
    optional: ClassVar[Mapping[str, tuple[str, ...]]] = {"bias": _SCALES, "g_idx": _INDICES}

    def tensors(self, shape: Shape, bits: int, groups: int) -> dict[str, tuple[Shape, tuple[str, ...]]]:
        outputs, inputs = shape
        return {
            "qweight": ((_words(inputs, bits), outputs), _WORDS),
            "qzeros": ((groups, _words(outputs, bits)), _WORDS),
            "scales": ((groups, outputs), _SCALES),
            "g_idx": ((inputs,), _INDICES),
            "bias": ((outputs,), _SCALES),
        }

    def grouped(self, matrix: PackedMatrix, tensors: Mapping[str, Tensor]) -> Grouped:
        outputs, inputs = matrix.shape
        if "bias" in tensors:
            matrix.check_zero("bias", tensors["bias"])
        if "g_idx" in tensors:
            matrix.check_order("g_idx", tensors["g_idx"])
        whole_OH = unpacked(tensors["qweight"].t(), matrix.bits, inputs)
        stored_GO = unpacked(tensors["qzeros"], matrix.bits, outputs)
        return Grouped(whole_OH, self._zeros(matrix, stored_GO).t(), tensors["scales"].t(), matrix.bits)

    def _zeros(self, matrix: PackedMatrix, stored_GO: Tensor) -> Tensor:
        """Zeros of published files that call themselves v1 and are v2: the values of symmetric ones tell."""
        low, high = map(int, stored_GO.aminmax())
        half, most = 1 << (matrix.bits - 1), (1 << matrix.bits) - 1
        if True in self.symmetric and low == high and low in (half - 1, half):
            return torch.full_like(stored_GO, half)
        if False not in self.symmetric:
            raise matrix.fail(
                "qzeros",
                f"holds {low} to {high}; expected {half - 1} (v1) or {half} (v2) everywhere, since the description says"
                " that it is symmetric; take another version of it",
            )
        if not self.less_one:
            return stored_GO
        if high == most:
            raise matrix.fail(
                "qzeros",
                f"holds {most} in GPTQ v1, which stores zeros less one: some programs read it as {most + 1}, some as 0"
                " and a carry; take a gptq_v2 version of it",
            )
        return stored_GO + 1


class PackQuantized(Packing):
    """compressed-tensors' ``pack-quantized``: words along inputs; of zeros, which are there if a matrix is not
    symmetric, along outputs."""

    key = "weight_packed"
    zeros = frozenset({"weight_zero_point"})
    optional: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "weight_zero_point": _WORDS, "weight_g_idx": _INDICES, "weight_shape": _INDICES
    }  # fmt: skip

    def tensors(self, shape: Shape, bits: int, groups: int) -> dict[str, tuple[Shape, tuple[str, ...]]]:
        outputs, inputs = shape
        return {
            "weight_packed": ((outputs, _words(inputs, bits)), _WORDS),
            "weight_scale": ((outputs, groups), _SCALES),
            "weight_zero_point": ((_words(outputs, bits), groups), _WORDS),
            "weight_g_idx": ((inputs,), _INDICES),
            "weight_shape": ((2,), _INDICES),
        }

    def grouped(self, matrix: PackedMatrix, tensors: Mapping[str, Tensor]) -> Grouped:
        outputs, inputs = matrix.shape
        if ("weight_zero_point" not in tensors) not in self.symmetric:
            kind = "asymmetric" if True not in self.symmetric else "symmetric"
            raise matrix.fail("weight_zero_point", f"contradicts the description, which says {kind}; {_FETCH}")
        if "weight_g_idx" in tensors:
            matrix.check_order("weight_g_idx", tensors["weight_g_idx"])
        if "weight_shape" in tensors and tensors["weight_shape"].tolist() != [outputs, inputs]:
            got = tensors["weight_shape"].tolist()
            raise matrix.fail("weight_shape", f"holds {got}; expected {[outputs, inputs]} from config.json; {_FETCH}")
        whole_OH, scale_OG = unpacked(tensors["weight_packed"], matrix.bits, inputs), tensors["weight_scale"]
        if "weight_zero_point" in tensors:
            zero_OG = unpacked(tensors["weight_zero_point"].t(), matrix.bits, outputs).t()
        else:
            zero_OG = torch.full(scale_OG.shape, 1 << (matrix.bits - 1), dtype=torch.uint8)
        return Grouped(whole_OH, zero_OG, scale_OG, matrix.bits)
