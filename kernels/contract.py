"""Operator contracts, and their registration as operators of this process.

A contract holds the schema exactly as torch_npu registers it. It also holds the forms that replace the NPU kernel: an
eager reference, a fake for tracing, and an ONNX form. If torch_npu is loaded (an NPU host with CANN), its operator runs
on the device. Elsewhere ours is registered under the same name, so one traced program serves both. torch_npu has
kernels for its device only, so the reference also computes CPU tensors on an NPU host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch


class _Opset:
    """An opset that is imported when its first operator is asked for: a machine with an NPU needs no ONNX."""

    def __init__(self, module: str, name: str) -> None:
        self._module, self._name = module, name

    def __getattr__(self, operator: str) -> Any:
        return getattr(getattr(import_module(self._module), self._name), operator)


# Any: onnxscript's stubs tie the element types of a whole expression together.
op: Any = _Opset("onnxscript.onnx_opset", "opset18")
"""Builds standard operators of opset 18."""
ort: Any = _Opset("draftwood.kernels.onnxruntime_ops", "opset")
"""Builds onnxruntime's own operators."""
standard: Any = _Opset("draftwood.kernels.onnxruntime_ops", "standard")
"""Builds those that onnxruntime adds to the standard ones."""

marks: Any = _Opset("draftwood.kernels.onnxruntime_ops", "marks")
"""Builds marks, which no graph keeps."""

_libraries: list[torch.library.Library] = []  # a Library unregisters its operators when collected


def declare(value: Any, *shape: Any) -> None:
    """Declares the shape of a result in an ONNX form whose operator has no shape rule in onnx."""
    import onnx_ir  # where a form is built, and nowhere else

    value.shape = onnx_ir.Shape(shape)


@dataclass(frozen=True, slots=True)
class Contract:
    """One operator: ``schema`` (with its name), its forms, and its namespace.

    ``reference`` computes on any device in eager PyTorch; ``fake`` gives shapes and dtypes only;
    ``onnx`` builds standard operators (opset 18). ``onnx_cpu`` builds onnxruntime's own operator if that is faster.
    An operator that mutates its input is registered for tracing in place and has no ONNX form.
    """

    schema: str
    reference: Callable[..., Any]
    fake: Callable[..., Any]
    onnx: Callable[..., Any] | None = None
    onnx_cpu: Callable[..., Any] | None = None
    namespace: str = "npu"

    @property
    def name(self) -> str:
        return self.schema.partition("(")[0]

    @property
    def operator(self) -> torch._ops.OpOverload:
        return getattr(getattr(torch.ops, self.namespace), self.name).default


def register(contracts: tuple[Contract, ...]) -> None:
    """Registers the parts of every contract that the process lacks: the operator, or its kernel for a CPU.
    Idempotent."""
    for contract in contracts:
        qualified = f"{contract.namespace}::{contract.name}"
        library = torch.library.Library(contract.namespace, "FRAGMENT")
        if not hasattr(getattr(torch.ops, contract.namespace), contract.name):
            library.define(contract.schema)
            library.impl(contract.name, contract.reference, "CompositeExplicitAutograd")
            torch.library.register_fake(qualified, contract.fake, lib=library)
        elif not torch._C._dispatch_has_computed_kernel_for_dispatch_key(qualified, "CPU"):
            library.impl(contract.name, contract.reference, "CPU")  # torch_npu's own
        _libraries.append(library)
