"""What a step moves between the host and the device, by its graphs' signatures: launches, and bytes each way."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any

from draftwood.manifest import Gear, GraphSignature, Manifest, TensorSignature, whole_name

# Bytes of a number.
_BYTES = {"int64": 8, "int32": 4, "bool": 1, "float32": 4, "float16": 2, "bfloat16": 2}
# Stays on the device: what a step leaves for acceptance and for the next step.
_KEPT = {"branch", "branch.out", "logits", "features", "features.in", "features.out"}
# What a step without acceptance in a graph reads back.
_TEACHER = {"logits", "features"}


def host_traffic(manifest: Manifest, graphs: Iterable[GraphSignature]) -> list[dict[str, Any]]:
    """A row for every gear, greedy and sampled, of a graph set that accepts on the device.

    ``apart`` is the same of a step whose parts are launched one by one, ``host_acceptance_read_bytes`` what would be
    read back if the host accepted. The rare rows that a graph leaves to the host
    (`draftwood.runtime.engines.acceptance`) are not counted, nor are features that wait from plain steps.
    """
    known = list(graphs)
    rows = [_gear(gear, draws, known) for gear in manifest.gears for draws in ("greedy", "sampled")]
    return [row for row in rows if row is not None]


def _gear(gear: Gear, draws: str, graphs: list[GraphSignature]) -> dict[str, Any] | None:
    named = {graph.name: graph for graph in graphs}
    verify = named[gear.graph]
    accept = named.get(f"accept-{draws}-t{verify.rows}")
    if accept is None:
        return None
    draft = named.get(f"{gear.draft}-kv{gear.slots}", named.get(gear.draft or ""))
    apart = _step([graph for graph in (draft, verify, accept) if graph is not None], draws)
    whole = named.get(whole_name(gear.name, draws))
    held = sum(_size(spec) for spec in verify.outputs if spec.name in _TEACHER)
    decided = sum(_size(spec) for spec in _moved(accept.outputs, accept))
    return {
        "gear": gear.name,
        "draws": draws,
        **(_step([whole], draws) if whole else apart),
        "apart": apart,
        "host_acceptance_read_bytes": apart["read_bytes"] - decided + held,
    }


def _step(graphs: list[GraphSignature], draws: str) -> dict[str, int]:
    """What the graphs of a step move, one launch each; the noise of greedy text, zeros, lies on the device."""
    sent = [
        spec for graph in graphs for spec in _moved(graph.inputs, graph) if (spec.name, draws) != ("noise", "greedy")
    ]
    return {
        "launches": len(graphs),
        "read_bytes": sum(_size(spec) for graph in graphs for spec in _moved(graph.outputs, graph)),
        "written_bytes": sum(map(_size, sent)),
    }


def _moved(specs: Iterable[TensorSignature], graph: GraphSignature) -> list[TensorSignature]:
    held = _KEPT | set(graph.caches) | set(graph.aliases)
    return [spec for spec in specs if spec.name not in held]


def _size(spec: TensorSignature) -> int:
    return _BYTES[spec.dtype] * prod(int(size) for size in spec.shape)
