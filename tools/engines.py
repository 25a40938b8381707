"""Which engine runs a bundle: on this machine's CPU, on its NPU, or its NPU graphs on the interpreter."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from draftwood.errors import RequestError

if TYPE_CHECKING:
    from draftwood.runtime.bundle import Bundle
    from draftwood.runtime.engine import Engine

ENGINES = ("cpu", "npu", "ge")


def add_engine_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--engine",
        choices=ENGINES,
        help="cpu: onnxruntime; npu: an Ascend NPU; ge: the NPU's graphs, interpreted, slow (default: npu where the"
        " machine and the bundle have one, else cpu)",
    )


def npu_available() -> bool:
    """Whether CANN is here and torch_npu counts a device."""
    from draftwood.tools.measure.machine import ascend

    return bool(ascend(countable=True)["npus"])


def default_engine(bundle: Bundle) -> str:
    """The best engine that machine and bundle allow."""
    return "npu" if bundle.manifest.npu is not None and npu_available() else "cpu"


def open_engine(bundle: Bundle, name: str | None = None) -> Engine:
    """The engine asked for, else the best that machine and bundle allow.

    Raises:
        RequestError: there is no such device.
        BundleError: the bundle holds no graphs for it.
    """
    name = name or default_engine(bundle)
    if name == "npu":
        if not npu_available():
            raise RequestError("--engine npu: no NPU is found here; run draftwood doctor, or take --engine ge")
        from draftwood.tools.reference.npu import NpuEngine

        return NpuEngine(bundle)
    if name == "ge":
        from draftwood.tools.reference.interpreted import GeEngine

        return GeEngine(bundle)
    from draftwood.runtime.engines.cpu import CpuEngine

    return CpuEngine(bundle)
