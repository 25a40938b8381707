"""Whether an opened graph has the manifest's inputs and outputs."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from draftwood.errors import BundleError
from draftwood.manifest import GraphSignature, TensorSignature

# As onnxruntime spells them.
_TYPES = {
    "tensor(int64)": "int64",
    "tensor(int32)": "int32",
    "tensor(bool)": "bool",
    "tensor(float)": "float32",
    "tensor(float16)": "float16",
    "tensor(bfloat16)": "bfloat16",
}
# Element type and shape by name.
Ends = dict[str, tuple[str, list[int | str]]]


def check_session(session: Any, signature: GraphSignature, path: Path) -> None:
    """Names, element types and shapes of an onnxruntime session against the graph's signature, in any order.

    Raises:
        BundleError: the first that differs. Memory is bound by the signature, so a graph that writes more than it
            says would write past the end of it.
    """
    check_ends(signature, path, _real(session.get_inputs()), _real(session.get_outputs()))


def check_ends(signature: GraphSignature, path: Path, inputs: Ends, outputs: Ends) -> None:
    """Checks inputs and outputs that were read from a graph in another way."""
    for what, got, declared in (("input", inputs, signature.inputs), ("output", outputs, signature.outputs)):
        expected = _declared(declared)
        for name in (*expected, *got):
            if got.get(name) != expected.get(name):
                raise BundleError(
                    f"{path}: {what} {name}: expected {_shown(expected.get(name))} by the manifest, got"
                    f" {_shown(got.get(name))} in the graph; build the bundle again"
                )


def _real(ends: Iterable[Any]) -> Ends:
    return {end.name: (_TYPES.get(end.type, end.type), list(end.shape)) for end in ends}


def _declared(specs: Iterable[TensorSignature]) -> Ends:
    return {spec.name: (spec.dtype, list(spec.shape)) for spec in specs}


def _shown(end: tuple[str, list[int | str]] | None) -> str:
    return "none" if end is None else f"{end[0]} {end[1]}"
