"""Does every graph of a bundle compute what eager PyTorch computes?

Equal argmax proves little, so logits, features and caches are compared, on trees with branches behind a real
prefix, through several steps with commits of every kind. Controls that are wrong on purpose (another mask, shifted
positions, a misrouted path, a dropped write) must be told apart by the same comparison. The NPU's graphs are
compared in their own element type, executed operator for operator by an interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftwood.environment import cann_available, npu_count
from draftwood.errors import RequestError
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.engines import StagedEngine, open_engine
from draftwood.runtime.engines.acl import is_compiled
from draftwood.runtime.engines.static import StaticEngine
from draftwood.runtime.proof import HALF_TOLERANCE, QUANTISED_TOLERANCE, TOLERANCE
from draftwood.tools.comparison.batches import compare_texts
from draftwood.tools.comparison.compare import (
    ROUNDED_TOLERANCE,
    Comparison,
    Pair,
    compare_chunk,
    compare_gear,
    worst,
)
from draftwood.tools.comparison.device_steps import compare_acceptance, compare_whole, in_parts
from draftwood.tools.comparison.faults import (
    Control,
    control,
    controls,
    draft_controls,
    graph_mutations,
    tree_step,
)
from draftwood.tools.comparison.tree_graphs import tree_faults
from draftwood.tools.prompts import read_prompts
from draftwood.tools.reference.eager import EagerEngine

PROMPT_TOKENS = 96
# Engines of the NPU's graphs, which are held against eager PyTorch in the NPU's type.
_NPU = ("ge", "npu", "npu-captured", "acl", "ranks")


def check(
    bundle: Bundle,
    prompts: list[NDArray[np.int64]],
    progress: Callable[[str], None] = lambda _: None,
    engine: str | None = None,
) -> dict[str, Any]:
    """The whole report: ``ok``, ``comparisons``, ``controls``, both by graph, and faults of ``trees`` by name.

    With ``engine`` of that one alone.
    """
    found: list[Comparison] = []
    caught: list[Control] = []
    pairs = _pairs(bundle, engine)
    for pair in pairs.values():
        found += _compare(bundle, pair, prompts, progress)
        for count in pair.engine.batches:
            progress(f"{pair.name}, {count} texts a launch")
            both = list(compare_texts(pair, count, prompts))
            found += worst(one for one in both if isinstance(one, Comparison))
            caught += [one for one in both if isinstance(one, Control)]
        if pair.name in ("cpu", "static", "bitwise", "ge", "npu", engine):
            for gear in bundle.manifest.gears:
                progress(f"{pair.name} faults, {gear.name}")
                caught += [*controls(pair, gear, prompts[0]), *draft_controls(pair, gear, prompts[0])]
    if "ge" in pairs:
        caught += _graph_controls(bundle, pairs["ge"], prompts[0])
    trees = {name: tree_faults(buffers) for name, (_, buffers) in bundle.trees.items()}
    return {
        "ok": all(c.ok for c in found) and all(c.caught for c in caught) and not any(trees.values()),
        "tolerance": TOLERANCE,
        "tolerances": {pair.name: pair.tolerance for pair in pairs.values()},
        "draft_tolerances": {pair.name: pair.draft_tolerance for pair in pairs.values()},
        "prompts": len(prompts),
        "nodes": {pair.name: dict(pair.engine.nodes) for pair in pairs.values() if pair.engine.nodes},
        "trees": trees,
        "comparisons": [asdict(c) for c in found],
        "controls": [asdict(c) for c in caught],
        "graphs": _by_graph(found),
        "mutations": len(caught),
        "mutations_caught": sum(c.caught for c in caught),
    }


def sample_prompts(bundle: Bundle, path: Path | None, limit: int) -> Iterator[NDArray[np.int64]]:
    """Token ids of real prompts where the bundle has a tokenizer, else of a seeded random text."""
    vocabulary, most = bundle.manifest.dims.vocabulary, min(g.slots for g in bundle.manifest.gears) // 2
    if bundle.tokenizer is None:
        if path is not None:
            raise RequestError(f"--prompts {path}: the bundle has no tokenizer; leave the option out")
        for seed in range(limit):
            yield np.random.default_rng(seed).integers(0, vocabulary, min(PROMPT_TOKENS, most))
        return
    for prompt in read_prompts(path, limit):
        ids = bundle.tokenizer.encode(prompt.text)
        yield np.array(ids[: min(PROMPT_TOKENS, most)] or [0], np.int64)


def _pairs(bundle: Bundle, only: str | None) -> dict[str, Pair]:
    """The engines that the bundle can be run with, or one, each with its reference; what is opened last needs most."""
    manifest, references = bundle.manifest, dict[bool, EagerEngine]()
    names = _engines(bundle) if only is None else [only]
    pairs = []
    for name in names:
        engine, npu = _opened(bundle, name), name in _NPU
        if npu not in references:
            references[npu] = EagerEngine(bundle, npu=npu)
        tolerance = HALF_TOLERANCE if engine.half else TOLERANCE
        least = (QUANTISED_TOLERANCE if int8 else 0.0 for int8 in (manifest.quantised, manifest.int8))
        pairs.append(Pair(name, references[npu], engine, *(max(tolerance, one) for one in least)))
    if len(references) > 1:
        pairs.append(Pair("eager", references[False], references[True], ROUNDED_TOLERANCE))
    return {pair.name: pair for pair in pairs}


def _engines(bundle: Bundle) -> list[str]:
    """Those that are compared unless one is named. OpenVINO's are not: they run the graphs of ``static``."""
    onnx, npu = bundle.manifest.graphs_of("onnx"), bundle.manifest.graph_set("ge")
    names = ["cpu", "static"] if onnx else []
    names += ["bitwise"] if any(graph.name == "bitwise" for graph in onnx) else []
    if npu is not None:
        names += ["ge"]
        names += ["npu"] if npu.ranks == 1 and npu_count() else []
        names += ["acl"] if npu.ranks == 1 and cann_available() and is_compiled(bundle.folder) else []
    return names or ["ge"]


def _opened(bundle: Bundle, name: str) -> StagedEngine:
    engine = open_engine(bundle, name)
    assert isinstance(engine, StagedEngine), f"{name} has no parts to compare"
    return engine


def _compare(
    bundle: Bundle, pair: Pair, prompts: list[NDArray[np.int64]], progress: Callable[[str], None]
) -> list[Comparison]:
    found: list[Comparison] = []
    for gear in bundle.manifest.gears:
        progress(f"{pair.name}, {gear.name}")
        found += worst(one for prompt in prompts for one in compare_gear(pair, gear, prompt))
        if isinstance(pair.engine, StaticEngine) and pair.engine.on_device.accepts:
            with in_parts(pair.engine):
                found += compare_acceptance(pair, gear, prompts[0])
            if pair.engine.on_device.has_whole and not gear.looks_up:
                found += worst(compare_whole(pair, gear, prompts[0]))
    if isinstance(pair.engine, StaticEngine):
        for graph in [*pair.engine.graphs, *pair.engine.drafting.extends]:
            if graph.kind in ("prefill", "extend"):
                progress(f"{pair.name}, {graph.name}")
                found += compare_chunk(pair, graph, prompts[0])
    return found


def _graph_controls(bundle: Bundle, pair: Pair, prompt: NDArray[np.int64]) -> Iterator[Control]:
    from draftwood.tools.reference.ge import GeEngine  # needs the compiler's npu extra

    rows = {tree.name: tree.rows for tree in bundle.manifest.trees}
    gear = max(bundle.manifest.gears, key=lambda gear: rows[gear.tree])
    for fault, mutate in graph_mutations().items():
        broken = Pair(pair.name, pair.reference, GeEngine(bundle, mutate=mutate), pair.tolerance, pair.of_drafts)
        yield control(pair, gear, fault, *tree_step(broken, gear, prompt))


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
