"""A graph's small tensors between host and device: one pinned block in, one out, as one copy each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod

import torch
from numpy.typing import NDArray
from torch import Tensor

from draftwood.compiler.steps.step import DTYPES
from draftwood.manifest import TensorSignature

# Tensors in a block that graphs read begin at multiples of this, which every kernel accepts.
_ALIGNMENT = 512


class HostInputs:
    """Inputs that the host writes, each at its place of a block: a compiled graph sees the same addresses."""

    def __init__(self, specs: Iterable[TensorSignature], device: torch.device) -> None:
        places, at = {}, 0
        for spec in specs:
            places[spec.name] = spec, at
            at += -(-_bytes(spec) // _ALIGNMENT) * _ALIGNMENT
        self._near, self._far = _pinned(at, device), torch.empty(at, dtype=torch.uint8, device=device)
        self._host = {name: _view(self._near, *place) for name, place in places.items()}
        self.tensors = {name: _view(self._far, *place) for name, place in places.items()}

    def upload(self, arrays: Mapping[str, NDArray]) -> None:
        """Hands the arrays over in one copy, which the next launch waits for."""
        for name, array in arrays.items():
            self._host[name].copy_(torch.from_numpy(array))
        if len(self._near):
            self._far.copy_(self._near, non_blocking=True)


class HostOutputs:
    """Outputs that the host reads, gathered in one block on the device and copied at once."""

    def __init__(self, outputs: Mapping[str, Tensor], device: torch.device) -> None:
        # The widest types first, so that each lies at a multiple of its size.
        self._order = sorted(outputs, key=lambda name: -outputs[name].element_size())
        size = sum(outputs[name].nbytes for name in self._order)
        self._near, self._far = _pinned(size, device), torch.empty(size, dtype=torch.uint8, device=device)
        self._host, at = {}, 0
        for name in self._order:
            value = outputs[name]
            self._host[name] = self._near[at : at + value.nbytes].view(value.dtype).view(value.shape)
            at += value.nbytes

    def gather(self, outputs: Mapping[str, Tensor]) -> None:
        """Copies the outputs to their places of the block on the device."""
        if self._order:
            parts = [outputs[name].contiguous().view(-1).view(torch.uint8) for name in self._order]
            torch.cat(parts, out=self._far)

    def download(self) -> dict[str, NDArray]:
        """The outputs in the host's memory, valid until the next call: floats as fp32, whole numbers unchanged."""
        if self._order:
            self._near.copy_(self._far)  # waits for all that was launched before it
        return {name: (v.float() if v.is_floating_point() else v).numpy() for name, v in self._host.items()}


def _shape(spec: TensorSignature) -> tuple[int, ...]:
    """An NPU's graphs are static."""
    return tuple(int(size) for size in spec.shape)


def _bytes(spec: TensorSignature) -> int:
    return prod(_shape(spec)) * DTYPES[spec.dtype].itemsize


def _view(block: Tensor, spec: TensorSignature, at: int) -> Tensor:
    return block[at : at + _bytes(spec)].view(DTYPES[spec.dtype]).view(_shape(spec))


def _pinned(size: int, device: torch.device) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=device.type != "cpu")
