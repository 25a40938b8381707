"""A stand-in for torch_npu's captured launches on a CPU: recorded operators are not executed, and a replay repeats them
with the record's memory.

It finds actions that a device does not allow inside a record: a host read, another record, a mode in which other
threads would end it. A record's or a replay's results in its own memory are destroyed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from draftwood.kernels import COMPOSED_CONTRACTS, CPU_CONTRACTS, GE_CONTRACTS

# Of our own operators a device runs the references, in torch_npu's kernels for the operators that they call.
OURS = {contract.operator: contract.reference for contract in GE_CONTRACTS + CPU_CONTRACTS + COMPOSED_CONTRACTS}
# Reads of the host that reach no dispatcher.
READS = {Tensor.numpy, Tensor.tolist, Tensor.item, Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.cpu}


class HostRead(RuntimeError):
    """A read by the host, which ends a capture on a device."""


class Call:
    """An operator of a record, with its memory; as on a device it keeps no tensor of anybody's."""

    def __init__(self, func: Any, args: Any, kwargs: Any, made: list[Tensor]) -> None:
        self.func, self.made = func, made
        self.args, self.kwargs = tree_map_only(Tensor, places, (args, kwargs))

    @property
    def memory(self) -> set[int]:
        """Addresses of all that it reads and writes."""
        return {one.untyped_storage().data_ptr() for one in tensors((self.args, self.kwargs, self.made))}

    def run(self) -> None:
        found = tensors(self.func(*self.args, **self.kwargs))
        for place, value in zip(self.made, found, strict=True) if self.made else ():
            place.copy_(value)


class NPUGraph:
    """A record, as torch_npu's class of this name."""

    def __init__(self) -> None:
        self.calls: list[Call] | None = None
        self.replays = 0

    def replay(self) -> None:
        assert self.calls is not None, "was not recorded, or was reset"
        self.replays += 1
        for call in self.calls:
            call.run()
        destroy(self.calls)

    def reset(self) -> None:
        self.calls = None


def destroy(calls: list[Call]) -> None:
    """Overwrites a record's own memory with numbers that cannot pass for a result."""
    for value in (one for call in calls for one in call.made):
        value.fill_(torch.nan if value.is_floating_point() else 1 if value.dtype == torch.bool else 77)


def places(value: Tensor) -> Tensor:
    """Another tensor of the same memory."""
    empty = torch.empty(0, dtype=value.dtype, device=value.device)
    return empty.set_(value.untyped_storage(), value.storage_offset(), value.shape, value.stride())


def tensors(values: Any) -> list[Tensor]:
    return [one for one in tree_leaves(values) if isinstance(one, Tensor)]


class Recording(TorchDispatchMode):
    """Notes operators; none writes into memory that it is given. Their result has its final shape."""

    def __init__(self, calls: list[Call]) -> None:
        super().__init__()
        self.calls = calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags:
            raise HostRead(f"{func} reads what a kernel has written")
        if func in OURS:
            with self:
                return OURS[func](*args, **kwargs)
        if func._schema.is_mutable:
            self.calls.append(Call(func, args, kwargs, []))
            return written(func, args, kwargs)
        found = func(*args, **kwargs)
        call = Call(func, args, kwargs, [])
        if not any(one.numel() and one.untyped_storage().data_ptr() in call.memory for one in tensors(found)):
            call.made = [places(one) for one in tensors(found)]
            self.calls.append(call)
        return found  # else a view


def written(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of an operator that writes its operands: these operands."""
    named = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    places = [named[a.name] for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return None if not func._schema.returns else places[0] if len(places) == 1 else tuple(places)


class NoReads(TorchFunctionMode):
    """Refuses calls that would wait for the device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS:
            raise HostRead(f"{func} inside of a capture")
        return func(*args, **(kwargs or {}))


class Npu(SimpleNamespace):
    """In place of ``torch_npu.npu``; keeps the recorded operators."""

    NPUGraph = NPUGraph

    def __init__(self) -> None:
        super().__init__(config=SimpleNamespace(allow_internal_format=True), records=[], recording=False)

    def graph_pool_handle(self) -> tuple[int, int]:
        return (0, 1)

    @contextmanager
    def graph(self, graph: NPUGraph, pool: Any = None, capture_error_mode: str = "global") -> Iterator[None]:
        assert not self.recording and graph.calls is None and pool == (0, 1)
        # In the "global" mode a thread that begins a text would end the capture.
        assert capture_error_mode == "thread_local" and not self.config.allow_internal_format
        calls: list[Call] = []
        self.recording = True
        try:
            with NoReads(), Recording(calls):
                yield
        finally:
            self.recording = False
        destroy(calls)
        graph.calls = calls
        self.records.append(graph)

    @property
    def calls(self) -> list[Call]:
        """Of all records."""
        return [call for graph in self.records for call in graph.calls or ()]
