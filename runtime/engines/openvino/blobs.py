"""Graphs compiled by OpenVINO, kept as blobs in the user's cache, next to the step times that are tuned.

A blob's name covers all that it was compiled from: graph and weights (the manifest's SHA-256), OpenVINO's version, the
device with its driver and compiler, and the settings. So another graph, device or version never finds it. It begins
with the SHA-256 of the rest, so a damaged one is compiled anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftwood.errors import BundleError
from draftwood.files import cache_home, read_regular, write_whole
from draftwood.manifest import GraphSignature
from draftwood.runtime.bundle import Bundle

# Raised when a blob's file is written otherwise.
_VERSION = 1
_DIGEST_BYTES = 32
_MOST_BYTES = 1 << 36


class Blobs:
    """A bundle's ONNX graphs on one device. ``core`` is an ``openvino.Core``."""

    def __init__(self, bundle: Bundle, core: Any, device: str, config: Mapping[str, Any]) -> None:
        self._bundle, self._core, self._device, self._config = bundle, core, device, dict(config)
        self._weights = next(graphs.weights for graphs in bundle.manifest.graph_sets if graphs.target == "onnx")
        self._facts = [str(_VERSION), device, *_device_facts(core, device), *map(str, sorted(config.items()))]

    def compiled(self, graph: GraphSignature) -> Any:
        """The graph as an ``openvino.CompiledModel``; a new compilation is kept.

        Raises:
            BundleError: OpenVINO cannot read the graph, or the device has not all of its operators.
        """
        stored = self._kept(graph)
        if stored is not None:
            with contextlib.suppress(RuntimeError):  # a driver that knows better
                return self._core.import_model(io.BytesIO(stored), self._device, self._opened_with)
        compiled = self._compile(graph)
        with contextlib.suppress(OSError, RuntimeError):  # no room, or a device without export: compiled next time
            self._keep(graph, compiled.export_model().getvalue())
        return compiled

    def file(self, graph: GraphSignature) -> Path:
        """Where the graph's blob is kept."""
        files = self._bundle.manifest.files
        facts = [*self._facts, *(files[name].sha256 for name in (graph.file, self._weights))]
        name = hashlib.sha256("\n".join(facts).encode()).hexdigest()
        return cache_home() / "draftwood" / "openvino" / f"{name}.blob"

    @property
    def _opened_with(self) -> dict[str, Any]:
        """A blob that was made small finds its weights in the bundle."""
        small = self._config.get("CACHE_MODE") == "OPTIMIZE_SIZE"
        return self._config | ({"WEIGHTS_PATH": str(self._bundle.folder / self._weights)} if small else {})

    def _kept(self, graph: GraphSignature) -> bytes | None:
        try:
            content = read_regular(self.file(graph), _MOST_BYTES)
        except OSError:
            return None
        digest, blob = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
        return blob if hashlib.sha256(blob).digest() == digest else None

    def _keep(self, graph: GraphSignature, blob: bytes) -> None:
        path = self.file(graph)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, hashlib.sha256(blob).digest() + blob)

    def _compile(self, graph: GraphSignature) -> Any:
        path = self._bundle.folder / graph.file
        try:
            model = self._core.read_model(path)
            refused = refused_operators(self._core, model, self._device)
            if not refused:
                return self._core.compile_model(model, self._device, self._config)
        except RuntimeError as error:
            raise BundleError(
                f"{path}: OpenVINO does not compile it for {self._device}: {str(error)[:300]}; take --engine cpu"
            ) from error
        raise BundleError(
            f"{path}: {self._device} has no {', '.join(refused)}; expected operators that it runs by itself; take"
            " --engine openvino, which runs on the CPU"
        )


def refused_operators(core: Any, model: Any, device: str) -> list[str]:
    """Operators of a model that a device does not run, each type once with the name of its first node."""
    operators = core.query_model(model, device)
    refused: dict[str, str] = {}
    for node in model.get_ordered_ops():
        if node.get_friendly_name() not in operators:
            refused.setdefault(node.get_type_name(), node.get_friendly_name())
    return [f"{kind} ({name})" for kind, name in refused.items()]


def _device_facts(core: Any, device: str) -> list[str]:
    """OpenVINO's version, and the facts by which its own cache knows a device: architecture, driver, compiler."""
    versions = core.get_versions(device)
    facts = [f"{name} {version.build_number}" for name, version in sorted(versions.items())]
    for name in sorted({"FULL_DEVICE_NAME", *core.get_property(device, "CACHING_PROPERTIES")}):
        with contextlib.suppress(RuntimeError):  # one that this driver does not know
            facts.append(f"{name} {core.get_property(device, name)}")
    return facts
