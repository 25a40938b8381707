"""Storage of a graph set's numbers: their types, and the conversion of a weight."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

import msgspec
import torch
from torch import Tensor

from draftwood import manifest as m
from draftwood.compiler.checkpoints.safetensors_file import is_finite
from draftwood.compiler.checkpoints.weight import WeightEntry
from draftwood.errors import CheckpointError


@dataclass(frozen=True)
class Storage:
    """A graph set's storage of weights: rounded to their type; a storage that does more overrides ``convert``."""

    types: m.Precision

    @property
    def weights(self) -> torch.dtype:
        """Element type of a stored weight outside quantised layers."""
        return cast(torch.dtype, getattr(torch, self.plain))

    @property
    def plain(self) -> m.ElementType:
        """The name of that element type."""
        return self.types.activations if self.quantised else self.types.weights

    @property
    def quantised(self) -> bool:
        """Whether it is for teachers with quantised layers, or packed ones."""
        return self.types.weights in ("int8", "uint4")

    def convert(self, name: str, value: Tensor) -> Tensor:
        """The stored form of the weight ``name``, in the type of ``weights``."""
        return value.to(self.weights)

    def keeps(self, kind: str) -> bool:
        """Whether ``convert`` leaves a checkpoint's weight of this element type unchanged."""
        return kind == self.plain

    def stored(self, entry: WeightEntry) -> WeightEntry:
        """The entry as a weights file gets it; whole numbers and their scales keep their types. Its ``read`` raises
        CheckpointError if a value leaves the range of the type."""
        if entry.dtype is not None:
            return entry
        return replace(entry, dtype=self.weights, read=lambda: self._read(entry))

    def _read(self, entry: WeightEntry) -> Tensor:
        read_value = entry.read()
        value = self.convert(entry.name, read_value)
        if not is_finite(value):
            names, kind = " and ".join(entry.parts) or entry.name, self.plain
            got, limit = float(read_value.abs().max()), torch.finfo(value.dtype).max
            raise CheckpointError(
                f"{names}: holds {got:.6g}; expected at most {limit:.6g}, the largest {kind}; choose another precision"
            )
        return value


def uniform(name: str, kind: m.ElementType) -> Storage:
    """One type for weights, activations and caches."""
    return Storage(m.Precision(name=name, weights=kind, activations=kind, caches=kind))


def w8a8(plain: Storage) -> Storage:
    """The storage of a teacher with quantised layers; its other numbers are in ``plain``."""
    types = msgspec.structs.replace(plain.types, name=f"w8a8-{plain.types.name}", weights="int8")
    return Storage(types)


def nbits(plain: Storage) -> Storage:
    """The storage of a teacher whose layers stay packed."""
    types = msgspec.structs.replace(plain.types, name=f"nbits-{plain.types.name}", weights="uint4")
    return Storage(types)


FP32, BF16, FP16 = uniform("fp32", "float32"), uniform("bf16", "bfloat16"), uniform("fp16", "float16")
_PLAIN = (FP32, BF16, FP16)
_ALL = (*_PLAIN, *map(w8a8, _PLAIN), *map(nbits, _PLAIN))
# By name, for weights that are bound to a bundle later.
PRECISIONS: dict[str, Storage] = {precision.types.name: precision for precision in _ALL}
