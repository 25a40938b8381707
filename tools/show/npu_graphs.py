"""The page of ``draftwood inspect --npu``: the NPU graphs of a bundle, proved and checked anew from their files."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

from draftwood.compiler.ge.atc import WORK_PATH, atc_command
from draftwood.compiler.ge.constraints import check_constraints
from draftwood.compiler.ge.graph import Graph
from draftwood.compiler.ge.interpreter import shapes
from draftwood.compiler.ge.operator_rules import engines
from draftwood.compiler.ge.proofs import prove_in_place, prove_places
from draftwood.compiler.ge.weights import WeightIndex, bundle_index
from draftwood.manifest import GraphSet, GraphSignature
from draftwood.runtime.bundle import Bundle

# The first weight that a block of the teacher reads.
_FIRST_WEIGHT = re.compile(r"layers\.(\d+)\.attn_norm\.weight")
# Nodes that carry no operator of the program.
_CARRIERS = ("Const", "FileConstant", "Data", "RefData", "NetOutput")


def npu_figures(bundle: Bundle) -> dict[str, Any]:
    """Per graph: operators, caches with their proof, findings, files."""
    npu = bundle.npu_graphs()
    index = bundle_index(bundle.folder, npu)
    loaded = [(signature, Graph.load(bundle.folder / signature.file)) for signature in npu.graphs]
    return {
        "kind": "npu",
        "ranks": npu.ranks,
        "dtype": npu.precision.weights,
        "soc": npu.soc,
        "needs": npu.needs,
        "weights": {"file": npu.weights, "bound": npu.weights in bundle.manifest.files},
        "rank_weights": [of_rank.weights for of_rank in bundle.manifest.rank_sets("ge")],
        "weight_bytes": index.bytes,
        "graphs": [_graph(bundle, signature, graph, npu, index) for signature, graph in loaded],
    }


def kernels(graph: Graph) -> dict[str, Any]:
    """How many kernels a device runs: in all, outside of the teacher's layers, and in its median layer by type.

    ``joins`` are not among them: GE runs one more for each if it does not lay its parts out one after the other.

    A layer begins with the norm that reads its first weight, and the last one ends before the last norm.
    """
    layers: dict[str, Counter[str]] = {}
    now = ""
    for node in graph.kernels:
        read = {edge.node for edge in node.operands if edge is not None}
        first = next((m[1] for name in read if (m := _FIRST_WEIGHT.fullmatch(name))), None)
        now = first if first is not None else "" if "norm.weight" in read else now
        layers.setdefault(now, Counter())[node.type] += 1
    outside = layers.pop("", Counter())
    counted = sorted(layers.values(), key=Counter.total)
    return {
        "all": len(graph.kernels),
        "joins": len(graph.laid_out()),
        "outside": outside.total(),
        "layers": len(counted),
        "layer": dict(sorted(counted[len(counted) // 2].items())) if counted else {},
    }


def _graph(
    bundle: Bundle, signature: GraphSignature, graph: Graph, npu: GraphSet, index: WeightIndex
) -> dict[str, Any]:
    prove_places(graph, signature, index)
    proof = prove_in_place(graph, signature)
    known = shapes(graph)
    findings = [finding._asdict() for finding in check_constraints(graph, known)]
    return {
        "name": signature.name,
        "kind": signature.kind,
        "rows": signature.rows,
        "slots": signature.slots,
        "air": signature.file,
        # ATC compiles no graph of several ranks for these chips.
        "atc": _atc(bundle.folder / signature.file, npu.soc or "", bundle.manifest.packed) if npu.ranks == 1 else None,
        "operators": graph.counts(),
        "kernels": kernels(graph),
        "engines": {name: engines(graph, known)[name] for name in ("AI Core", "AI CPU", "none")},
        "caches": [cache.cache for cache in proof],
        "in_place": {"proved": True, "caches": [cache._asdict() for cache in proof]},
        "findings": findings,
        "constraint_warnings": [finding for finding in findings if finding["level"] == "warning"],
    }


def _atc(air: Path, soc: str, packed: bool) -> str:
    """The line that compiles a graph, from any folder: ATC looks for the weights where it runs."""
    folder = shlex.quote(str(air.parent.resolve()))
    return f"cd {folder} && mkdir -p om && {WORK_PATH} " + " ".join(atc_command(air.name, soc, packed))


def npu_text(figures: dict[str, Any]) -> str:
    """`npu_figures` for people."""
    bound = "bound" if figures["weights"]["bound"] else "not bound: draftwood bind gives them"
    size = (
        f"{figures['weight_bytes'] / 1e9:.2f} GB"
        if figures["weight_bytes"] >= 1e8
        else f"{figures['weight_bytes']} bytes"
    )
    lines = [f"NPU graphs in {figures['dtype']} for {figures['soc']}; weights {size}, {bound}"]
    if figures["ranks"] > 1:
        lines.append(f"{figures['ranks']} ranks run them together, each over weights of its own")
    lines.append("needs at least " + ", ".join(f"{name} {least}" for name, least in figures["needs"].items()))
    if figures["ranks"] == 1:
        lines.append(
            f"ATC reads all weights for every graph, {figures['weight_bytes'] / 1e9:.1f} GB: it takes minutes each, and"
            " two to three times that of the host's memory (not measured)"
        )
    lines.append("")
    for graph in figures["graphs"]:
        operators = sum(count for name, count in graph["operators"].items() if name not in _CARRIERS)
        lines.append(f"{graph['name']}  {graph['air']}")
        lines.append(f"  operators   {operators}: {', '.join(f'{n} {c}' for n, c in graph['operators'].items())}")
        lines.append(f"  kernels     {_kernels(graph['kernels'])}")
        lines.append("  engines     " + ", ".join(f"{name} {count}" for name, count in graph["engines"].items()))
        if graph["caches"]:
            lines.append(f"  caches      {len(graph['caches'])}, each one RefData with one write and no copy: proved")
        lines += _findings(graph["findings"])
        lines.append(f"  compile     {graph['atc'] or 'through torchair, on every rank'}")
    return "\n".join(lines)


def _kernels(counted: dict[str, Any]) -> str:
    every = str(counted["all"])
    if counted["joins"]:
        every += f" ({counted['all'] + counted['joins']} if GE runs one for each join of rows)"
    if not counted["layers"]:
        return every
    layer = counted["layer"]
    by_type = ", ".join(f"{name} {count}" for name, count in layer.items())
    return (
        f"{every}: {counted['outside']} outside of {counted['layers']} layers of {sum(layer.values())} each: {by_type}"
    )


def _findings(findings: list[dict[str, Any]]) -> list[str]:
    """One line for findings that differ by their node alone."""
    same = Counter((f["level"], f["rule"], f["message"], f["source"]) for f in findings)
    return [
        f"  {level:<11} {rule}, {count} nodes: {message} ({source})"
        for (level, rule, message, source), count in same.items()
    ]
