"""``draftwood check``: does every graph of a bundle compute what eager PyTorch computes?

Equal argmax proves little, so logits, features and caches are compared, on trees with branches behind a real
prefix, through several steps with commits of every kind. Controls that are wrong on purpose (another mask, shifted
positions, a misrouted path, a dropped write) must be told apart by the same comparison. The NPU's graphs are
compared in their own element type, executed operator for operator by an interpreter.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from draftwood.errors import RequestError

if TYPE_CHECKING:
    from draftwood.runtime.bundle import Bundle
    from draftwood.tools.comparison.compare import Comparison, Pair
    from draftwood.tools.comparison.faults import Control

# fp32 graphs of one function differ by rounding and the order of sums: some 1e-6 of the largest value for the
# models tried. A wrong mask or position moves logits by 1e-1; 1e-4 lies well away from both.
TOLERANCE = 1e-4
# bf16 keeps 8 bits: one rounding is 4e-3 of a value, and sums taken in another order differ by a few of them.
# A wrong mask moves logits by ten times as much.
HALF_TOLERANCE = 3e-2
# How far bf16 is from fp32 is the model's own business, not a fault: reported, and refused only where it is absurd.
ROUNDED_TOLERANCE = 2e-1
PROMPT_TOKENS = 96
QUANTITIES = ("logits", "features", "choice", "draft scores", "draft tokens", "cache after commit", "draft cache")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", type=Path, metavar="BUNDLE")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help='JSON lines with a "prompt" (default: built in)')
    parser.add_argument("--limit", type=int, default=2, metavar="N", help="prompts to use (default 2)")
    parser.add_argument("--replay", type=Path, metavar="DUMP", help="run one dumped step again, and nothing else")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def main(args: argparse.Namespace) -> int:
    from draftwood.runtime.bundle import Bundle
    from draftwood.runtime.engine import share_threads

    if args.replay is not None:
        from draftwood.tools.reference.replay import main as replay

        return replay([str(args.replay), "--bundle", str(args.bundle), *(["--json"] if args.json else [])])
    share_threads()
    bundle = Bundle.open(args.bundle)
    report = check(bundle, list(sample_prompts(bundle, args.prompts, args.limit)), progress=_progress)
    (args.bundle / "check.json").write_text(json.dumps(report, indent=1) + "\n")
    if args.json:
        print(json.dumps(report))
    else:
        _print(report)
    return 0 if report["ok"] else 1


def check(
    bundle: Bundle, prompts: list[NDArray[np.int64]], progress: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """The whole report: ``ok``, ``comparisons``, ``controls``, and both by graph."""
    from draftwood.tools.comparison.faults import controls, draft_controls

    found: list[Comparison] = []
    caught: list[Control] = []
    pairs = _pairs(bundle)
    for pair in pairs.values():
        found += _compare(bundle, pair, prompts, progress)
        if pair.name in ("onnx-cpu", "ge", "npu"):
            for gear in bundle.manifest.gears:
                progress(f"{pair.name} faults, {gear.name}")
                caught += [*controls(pair, gear, prompts[0]), *draft_controls(pair, gear, prompts[0])]
    if "ge" in pairs:
        caught += _graph_controls(bundle, pairs["ge"], prompts[0])
    differences = [_located(bundle, pairs["ge"], one, prompts) for one in found if one.graphs == "ge" and not one.ok]
    return {
        "ok": all(c.ok for c in found) and all(c.caught for c in caught),
        "tolerance": TOLERANCE,
        "tolerances": {pair.name: pair.tolerance for pair in pairs.values()},
        "prompts": len(prompts),
        "comparisons": [asdict(c) for c in found],
        "controls": [asdict(c) for c in caught],
        "graphs": _by_graph(found),
        "mutations": len(caught),
        "mutations_caught": sum(c.caught for c in caught),
        "first_divergences": [line for line in differences if line],
    }


def sample_prompts(bundle: Bundle, path: Path | None, limit: int) -> Iterator[NDArray[np.int64]]:
    """Token ids of real prompts where the bundle has a tokenizer, else of a seeded random text."""
    vocabulary, most = bundle.manifest.dims.vocabulary, min(g.slots for g in bundle.manifest.gears) // 2
    if bundle.text is None:
        if path is not None:
            raise RequestError(f"--prompts {path}: the bundle has no tokenizer; leave the option out")
        for seed in range(limit):
            yield np.random.default_rng(seed).integers(0, vocabulary, min(PROMPT_TOKENS, most))
        return
    from draftwood.tools.prompts import read_prompts

    for prompt in read_prompts(path, limit):
        ids = bundle.text.encode(prompt.text)
        yield np.array(ids[: min(PROMPT_TOKENS, most)] or [0], np.int64)


def _pairs(bundle: Bundle) -> dict[str, Pair]:
    """Every engine the bundle can be run with, each with its reference; what is opened last needs most."""
    from draftwood.runtime.engines.cpu import CpuEngine
    from draftwood.runtime.engines.static import OnnxEngine
    from draftwood.tools.comparison.compare import Pair
    from draftwood.tools.engines import npu_available
    from draftwood.tools.reference.eager import EagerEngine

    pairs = []
    eager = EagerEngine(bundle) if bundle.manifest.graph_set("onnx") else None
    if eager is not None:
        pairs += [
            Pair("onnx-cpu", eager, CpuEngine(bundle), TOLERANCE),
            Pair("onnx", eager, OnnxEngine(bundle), TOLERANCE),
        ]
    if bundle.manifest.graph_set("ge") is not None:
        from draftwood.tools.reference.interpreted import GeEngine

        rounded = EagerEngine(bundle, npu=True)
        pairs.append(Pair("ge", rounded, GeEngine(bundle), HALF_TOLERANCE))
        if npu_available():
            from draftwood.tools.reference.npu import NpuEngine

            pairs.append(Pair("npu", rounded, NpuEngine(bundle), HALF_TOLERANCE))
        if eager is not None:
            pairs.append(Pair("eager", eager, rounded, ROUNDED_TOLERANCE))
    return {pair.name: pair for pair in pairs}


def _compare(
    bundle: Bundle, pair: Pair, prompts: list[NDArray[np.int64]], progress: Callable[[str], None]
) -> list[Comparison]:
    from draftwood.runtime.engines.static import StaticEngine
    from draftwood.tools.comparison.compare import compare_gear, compare_prefill, worst

    found: list[Comparison] = []
    for gear in bundle.manifest.gears:
        progress(f"{pair.name}, {gear.name}")
        found += worst(one for prompt in prompts for one in compare_gear(pair, gear, prompt))
    if isinstance(pair.engine, StaticEngine):
        for graph in pair.engine.graphs:
            if graph.kind == "prefill":
                progress(f"{pair.name}, {graph.name}")
                found.append(compare_prefill(pair, graph, prompts[0]))
    return found


def _graph_controls(bundle: Bundle, pair: Pair, prompt: NDArray[np.int64]) -> Iterator[Control]:
    from draftwood.tools.comparison.compare import Pair
    from draftwood.tools.comparison.faults import control, graph_mutations, tree_step
    from draftwood.tools.reference.interpreted import GeEngine

    rows = {tree.name: tree.rows for tree in bundle.manifest.trees}
    gear = max(bundle.manifest.gears, key=lambda gear: rows[gear.tree])
    for fault, mutate in graph_mutations().items():
        broken = Pair(pair.name, pair.reference, GeEngine(bundle, mutate), pair.tolerance)
        yield control(pair, gear, fault, *tree_step(broken, gear, prompt))


def _located(bundle: Bundle, pair: Pair, one: Comparison, prompts: list[NDArray[np.int64]]) -> str | None:
    """The first node at which a differing NPU graph parts from its program, on the inputs of a first tree step."""
    from draftwood.tools.comparison.divergence import first_divergence
    from draftwood.tools.comparison.faults import tree_of
    from draftwood.tools.reference.eager import EagerEngine
    from draftwood.tools.reference.interpreted import GeEngine

    eager, engine = pair.reference, pair.engine
    assert isinstance(eager, EagerEngine) and isinstance(engine, GeEngine)
    graph = next((g for g in engine.graphs if g.name == one.graph), None)
    if graph is None or graph.kind not in ("decode", "verify"):
        return None
    gear = next(g for g in bundle.manifest.gears if g.graph == one.graph)
    inputs = engine.inputs_of(gear, prompts[0], tree_of(eager, gear, prompts[0]))
    found = first_divergence(eager, engine, graph, inputs, pair.tolerance)
    return f"{one.graph}: {one.quantity}: {found or 'no single node differs by itself'}"


def _by_graph(comparisons: list[Comparison]) -> dict[str, dict[str, dict[str, Any]]]:
    """Graph -> engine -> the worst of all its quantities."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for c in comparisons:
        entry = found.setdefault(c.graph, {}).setdefault(
            c.graphs, {"difference": 0.0, "quantity": c.quantity, "tolerance": c.tolerance, "ok": True}
        )
        if c.difference >= entry["difference"]:
            entry |= {"difference": c.difference, "quantity": c.quantity}
        entry["ok"] = entry["ok"] and c.ok
    return found


def _progress(what: str) -> None:
    print(f"checking {what}", file=sys.stderr, flush=True)


def _print(report: dict[str, Any]) -> None:
    rows: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for c in report["comparisons"]:
        rows.setdefault((c["gear"] or c["graph"], c["graphs"]), {})[c["quantity"]] = c
    allowed = ", ".join(f"{name} {tolerance:.0e}" for name, tolerance in report["tolerances"].items())
    print(f"largest difference from eager PyTorch, as a share of the largest value; allowed: {allowed}")
    print(f"{'gear or graph':24} {'graphs':9}" + "".join(f"{quantity:>20}" for quantity in QUANTITIES))
    for (gear, graphs), found in rows.items():
        cells = [
            f"{found[q]['difference']:.1e}{'' if found[q]['ok'] else ' !'}" if q in found else "" for q in QUANTITIES
        ]
        print(f"{gear:24} {graphs:9}" + "".join(f"{cell:>20}" for cell in cells))
    for c in report["comparisons"]:
        if not c["ok"]:
            print(
                f"DIFFERS: {c['graph']}, {c['graphs']} graphs: {c['quantity']} at {c['where']}: {c['difference']:.2e}"
            )
    for line in report["first_divergences"]:
        print(f"PARTS: {line}")
    for c in report["controls"]:
        if not c["caught"]:
            print(f"NOT CAUGHT: {c['gear']}, {c['graphs']}: {c['fault']} (difference {c['difference']:.2e})")
    print(f"{report['mutations_caught']} of {report['mutations']} deliberate faults caught")
    print("ok" if report["ok"] else "FAILED")
