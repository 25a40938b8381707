"""The packages that abilities need, the extras that bring them, and which are here: looked up, not imported."""

from __future__ import annotations

import importlib.metadata
import importlib.util

from draftwood import environment
from draftwood.runtime.engines.registry import engines

RUN = ("numpy", "onnxruntime", "tokenizers", "msgspec", "jinja2")
SERVE = ("starlette", "uvicorn", "prometheus_client", "llguidance")
BUILD = ("safetensors", "torch", "onnx", "onnxscript", "networkx")
# Packages whose module has another name.
MODULES = {"protobuf": "google.protobuf"}
# Package -> the extra that brings it; "" is the base installation.
EXTRAS = {
    **{package: kind.extra for kind in engines().values() for package in kind.packages},
    **dict.fromkeys(RUN, ""),
    **dict.fromkeys((*BUILD, "matplotlib"), "build"),
    **dict.fromkeys(("safetensors", "protobuf"), "device"),
    "transformers": "reference",
    **dict.fromkeys(SERVE, "serve"),
    "ray": "cluster",
}


def version(name: str) -> str | None:
    """A package's version without importing it; None if it is not installed."""
    if name == "torch_npu":
        there = environment.torch_npu_installed()  # the usual way does not see it while it is hidden
    else:
        try:
            there = importlib.util.find_spec(MODULES.get(name, name)) is not None
        except (ImportError, ValueError):
            there = False
    try:
        return importlib.metadata.version(name) if there else None
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def install(name: str) -> str:
    """The pip command that brings a package."""
    return f"pip install 'draftwood[{EXTRAS[name]}]'" if EXTRAS[name] else "pip install draftwood"
