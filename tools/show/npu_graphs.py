"""What ``draftwood inspect --npu`` shows: the NPU graphs of a bundle, proved and checked anew from their files."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

from draftwood.compiler.device.devices import DEVICES
from draftwood.compiler.device.steps import step_s
from draftwood.compiler.ge.atc import atc_command
from draftwood.compiler.ge.constraints import check_constraints
from draftwood.compiler.ge.graph import Graph
from draftwood.compiler.ge.interpreter import shapes
from draftwood.compiler.ge.operator_rules import engines
from draftwood.compiler.ge.proofs import prove_in_place
from draftwood.compiler.ge.weights import read_index
from draftwood.compiler.teachers.registry import described_config
from draftwood.manifest import GraphSet, GraphSignature
from draftwood.runtime.bundle import Bundle
from draftwood.tools.show.host_traffic import host_traffic

# What a converter adds around its operator, and what carries no operator of the program.
# The first weight that a block of the teacher reads.
_FIRST_WEIGHT = re.compile(r"layers\.(\d+)\.attn_norm\.weight")
_CARRIERS = ("Const", "FileConstant", "Data", "RefData", "NetOutput")


def npu_figures(bundle: Bundle) -> dict[str, Any]:
    """Per graph: operators, caches with their proof, findings, files; and the converter coverage of all."""
    npu = bundle.npu_graphs()
    loaded = [(signature, Graph.load(bundle.folder / signature.file)) for signature in npu.graphs]
    coverage: Counter[tuple[str, str]] = Counter()
    for _, graph in loaded:
        coverage.update(converted(graph))
    return {
        "kind": "npu",
        "ranks": npu.ranks,
        "dtype": npu.precision.weights,
        "soc": npu.soc,
        "needs": npu.needs,
        "weights": {"file": npu.weights, "bound": npu.weights in bundle.manifest.files},
        "rank_weights": [one.weights for one in bundle.manifest.rank_sets("ge")],
        "weight_bytes": read_index(bundle.folder / npu.index).bytes if npu.index else 0,
        "graphs": [_graph(bundle, signature, graph, npu) for signature, graph in loaded],
        "host_traffic": host_traffic(bundle.manifest, npu.graphs),
        "coverage": [
            {"operator": operator, "ge": ge, "count": count}
            for (operator, ge), count in sorted(coverage.items(), key=lambda item: (-item[1], item[0]))
        ],
    }


def converted(graph: Graph) -> Counter[tuple[str, str]]:
    """How often each operator of the program became which chain of GE operators.

    torchair notes the program's operator on the last GE operator of each conversion; those before it, since the last
    note, belong to it.
    """
    found: Counter[tuple[str, str]] = Counter()
    chain: list[str] = []
    for node in graph.nodes.values():
        if node.type in _CARRIERS:
            continue
        chain.append(node.type)
        operator = next((d.operator for d in node.output_types if d.operator), "")
        if operator:
            found[operator, " > ".join(chain)] += 1
            chain = []
    return found


def kernels(graph: Graph) -> dict[str, Any]:
    """How many kernels a device runs: in all, outside of the teacher's layers, and in its median layer by type.

    ``joins`` are not among them: GE runs one more for each where it does not lay its parts out behind each other.

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


def _graph(bundle: Bundle, signature: GraphSignature, graph: Graph, npu: GraphSet) -> dict[str, Any]:
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
        "modelled_ms": _modelled_ms(bundle, signature, npu),
        "engines": {name: engines(graph, known)[name] for name in ("AI Core", "AI CPU", "none")},
        "caches": [one.cache for one in proof],
        "in_place": {"proved": True, "caches": [one._asdict() for one in proof]},
        "findings": findings,
        "constraint_warnings": [finding for finding in findings if finding["level"] == "warning"],
    }


def _modelled_ms(bundle: Bundle, signature: GraphSignature, npu: GraphSet) -> float | None:
    """A teacher's step on the chip that the graphs are for; None of other graphs, and of a chip without figures."""
    chip = next((device for device in DEVICES.values() if device.soc == npu.soc), None)
    if signature.kind not in ("decode", "verify") or chip is None:
        return None
    config = described_config(bundle.manifest.teacher.config)
    return round(1e3 * step_s(chip, config, signature.rows, signature.slots, npu.ranks), 3)


def _atc(air: Path, soc: str, packed: bool) -> str:
    """The line that compiles a graph, from any folder: ATC looks for the weights where it runs."""
    folder = shlex.quote(str(air.parent.resolve()))
    return f"cd {folder} && mkdir -p om && " + " ".join(atc_command(air.name, soc, packed))


def npu_text(found: dict[str, Any]) -> str:
    """`npu_figures` for people."""
    bound = "bound" if found["weights"]["bound"] else "not bound: draftwood bind gives them"
    size = f"{found['weight_bytes'] / 1e9:.2f} GB" if found["weight_bytes"] >= 1e8 else f"{found['weight_bytes']} bytes"
    lines = [f"NPU graphs in {found['dtype']} for {found['soc']}; weights {size}, {bound}"]
    if found["ranks"] > 1:
        lines.append(f"{found['ranks']} ranks run them together, each over weights of its own")
    lines.append("needs at least " + ", ".join(f"{name} {least}" for name, least in found["needs"].items()))
    if found["ranks"] == 1:
        lines.append(
            f"ATC reads all weights for every graph, {found['weight_bytes'] / 1e9:.1f} GB: it takes minutes each, and"
            " two to three times that of the host's memory (not measured)"
        )
    lines.append("")
    for graph in found["graphs"]:
        operators = sum(count for name, count in graph["operators"].items() if name not in _CARRIERS)
        lines.append(f"{graph['name']}  {graph['air']}")
        lines.append(f"  operators   {operators}: {', '.join(f'{n} {c}' for n, c in graph['operators'].items())}")
        lines.append(f"  kernels     {_kernels(graph['kernels'])}")
        if graph["modelled_ms"] is not None:
            lines.append(f"  step        {graph['modelled_ms']:.2f} ms, modelled; nothing was measured on a device")
        lines.append("  engines     " + ", ".join(f"{name} {count}" for name, count in graph["engines"].items()))
        if graph["caches"]:
            lines.append(f"  caches      {len(graph['caches'])}, each one RefData with one write and no copy: proved")
        lines += _findings(graph["findings"])
        lines.append(f"  compile     {graph['atc'] or 'through torchair, on every rank'}")
    lines += [
        "",
        "a step between host and device: launches, bytes read, written, and read if the host accepted",
    ]
    lines += [
        f"  {f['gear']} {f['draws']}: {f['launches']}, {f['read_bytes']}, {f['written_bytes']},"
        f" {f['host_acceptance_read_bytes']}"
        for f in found["host_traffic"]
    ]
    lines += ["", "converter coverage: operator of the program > operators of GE, count"]
    width = max(len(row["operator"]) for row in found["coverage"])
    lines += [f"  {row['operator']:<{width}}  {row['ge']}  {row['count']}" for row in found["coverage"]]
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
