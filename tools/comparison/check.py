"""Does every graph of a bundle compute what eager PyTorch computes?

Equal argmax proves little. So logits, features and caches are compared, on trees with branches after a real prefix,
through several steps with commits of every kind. They are compared twice. Whole, rounding grows with depth. Block by
block, each from the graph's own input, it does not. The same comparison must notice controls that are wrong on purpose
(another mask, shifted positions, a misrouted path, a dropped write, a wrong scale). The NPU's graphs are compared in
their own element type, executed operator for operator by an interpreter.
"""

from __future__ import annotations

import gc
import resource
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftwood.errors import RequestError
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.engines.choice import default_engine, open_engine
from draftwood.runtime.engines.opening import Opening
from draftwood.runtime.engines.registry import engine_kind, engines
from draftwood.runtime.engines.static import StaticEngine
from draftwood.runtime.rounding import HALF_TOLERANCE, QUANTISED_TOLERANCE, TOLERANCE
from draftwood.tools.comparison.allowed import Allowed, measured
from draftwood.tools.comparison.batches import compare_texts
from draftwood.tools.comparison.compare import (
    CHOSEN,
    ROUNDED_TOLERANCE,
    SCORES,
    Comparison,
    Pair,
    compare_chunk,
    compare_far,
    compare_gear,
    worst,
)
from draftwood.tools.comparison.device_steps import compare_acceptance, compare_whole, in_parts
from draftwood.tools.comparison.drafts import measured_drafts
from draftwood.tools.comparison.faults import (
    Control,
    ReferenceSteps,
    control,
    controls,
    draft_controls,
    graph_mutations,
    tree_of,
)
from draftwood.tools.comparison.taps import TAPPED
from draftwood.tools.comparison.tree_graphs import tree_faults
from draftwood.tools.prompts import read_prompts
from draftwood.tools.reference.followed import ExchangedEager, FollowingEager

PROMPT_TOKENS = 96
_MUCH = 1 << 19  # KiB, as getrusage counts


def check(
    bundle: Bundle,
    prompts: list[NDArray[np.int64]],
    progress: Callable[[str], None] = lambda _: None,
    engine: str | None = None,
) -> dict[str, Any]:
    """The whole report: ``ok``, ``comparisons``, ``controls``, both by graph, and faults of ``trees`` by name.

    With ``engine`` of that one alone.
    """
    comparisons: list[Comparison] = []
    caught: list[Control] = []
    cycles = Cycles()
    tolerances, draft_tolerances = dict[str, dict[str, float]](), dict[str, float]()
    nodes = dict[str, dict[str, int]]()
    if bundle.manifest.graphs_of("ge") and (engine is None or engine_kind(engine).target == "ge"):
        _prove_graphs(bundle, progress)
    for pair in _pairs(bundle, prompts, engine, cycles):
        # What is held block by block as well needs no second look at it whole.
        comparisons += _compare(bundle, pair, prompts if pair.drafts else prompts[:1], progress)
        cycles.free()
        for count in pair.engine.batches:
            progress(f"{pair.name}, {count} texts a launch")
            both = list(compare_texts(pair, count, prompts))
            comparisons += worst(result for result in both if isinstance(result, Comparison))
            caught += [result for result in both if isinstance(result, Control)] if pair.drafts else []
            cycles.free()
        if pair.drafts and (pair.following or pair.name in ("ge", "npu", engine)):
            for gear in bundle.manifest.gears:
                progress(f"{pair.name} faults, {gear.name}")
                caught += [*controls(pair, gear, prompts[0]), *draft_controls(pair, gear, prompts[0])]
        caught += _graph_controls(bundle, pair, prompts[0]) if pair.name == "ge" else []
        nodes |= {pair.name: dict(pair.engine.nodes)} if pair.engine.nodes else {}
        tolerances[pair.name] = {name: allowed.value for name, allowed in pair.measured.items()}
        draft_tolerances[pair.name] = pair.draft_tolerance
        del pair  # or its engine would stay open while the next one is opened
    trees = {name: tree_faults(buffers) for name, (_, buffers) in bundle.trees.items()}
    return {
        "ok": all(c.ok for c in comparisons) and all(c.caught for c in caught) and not any(trees.values()),
        "tolerances": tolerances,
        "draft_tolerances": draft_tolerances,
        "prompts": len(prompts),
        "nodes": nodes,
        "trees": trees,
        "comparisons": [asdict(c) for c in comparisons],
        "controls": [asdict(c) for c in caught],
        "graphs": _by_graph(comparisons),
        "mutations": len(caught),
        "mutations_caught": sum(c.caught for c in caught),
    }


class Cycles:
    """Engines and their texts, in cycles with caches whose size Python's collection does not know."""

    def __init__(self) -> None:
        self._before = self._peak()

    def free(self) -> None:
        """Collects those that nobody reads, if the comparison has come to need much memory."""
        if self._peak() > self._before + _MUCH:
            gc.collect()

    def _peak(self) -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def sample_prompts(bundle: Bundle, path: Path | None, limit: int) -> Iterator[NDArray[np.int64]]:
    """Token ids of real prompts if the bundle has a tokenizer, else of a seeded random text."""
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


def _pairs(bundle: Bundle, prompts: list[NDArray[np.int64]], only: str | None, cycles: Cycles) -> Iterator[Pair]:
    """The engines that the bundle can be run with, or one, each with its reference, opened when it is asked for.

    An engine that shows its states is compared twice: as it is, whole, and block by block.
    """
    references = dict[bool, ExchangedEager]()
    moves = dict[bool, tuple[dict[str, Allowed], dict[str, Allowed]]]()
    for name in _engines(bundle) if only is None else [only]:
        npu = engine_kind(name).target == "ge"  # held against eager PyTorch in the NPU's type
        if npu not in references:
            references[npu] = ExchangedEager(bundle, npu=npu)
            moves[npu] = _measured(references[npu], prompts)
        yield from _of_engine(bundle, name, references[npu], *moves[npu], cycles)
        cycles.free()
    if len(references) > 1:
        yield Pair("eager", references[False], references[True], ROUNDED_TOLERANCE)


def _measured(
    reference: ExchangedEager, prompts: list[NDArray[np.int64]]
) -> tuple[dict[str, Allowed], dict[str, Allowed]]:
    """By quantity what rounding may move of whole launches, and of halves of blocks and the drafts after them."""
    whole, halves = measured(reference, prompts[:1])
    if not reference.bundle.manifest.int8 or reference.half:
        return whole, halves
    least = Allowed(SCORES * QUANTISED_TOLERANCE, CHOSEN)
    return whole, halves | {"draft scores": max(least, measured_drafts(reference, prompts))}


def _of_engine(
    bundle: Bundle,
    name: str,
    reference: ExchangedEager,
    whole: dict[str, Allowed],
    halves: dict[str, Allowed],
    cycles: Cycles,
) -> Iterator[Pair]:
    """The engine, and once that is closed and its memory free, the same engine with states to be seen."""
    engine = open_engine(bundle, Opening(engine=name))
    tolerance = HALF_TOLERANCE if engine.half else TOLERANCE
    int8 = bundle.manifest.quantised, bundle.manifest.int8
    tolerance, of_drafts = (max(tolerance, QUANTISED_TOLERANCE if quantised else 0.0) for quantised in int8)
    if name not in TAPPED:
        least = Allowed(tolerance, CHOSEN)
        yield Pair(
            name, reference, engine, tolerance, of_drafts, {k: max(allowed, least) for k, allowed in whole.items()}
        )
        return
    yield Pair(name, reference, engine, tolerance, of_drafts, whole, drafts=False)
    del engine
    cycles.free()
    tapped = TAPPED[name](bundle)
    yield Pair(f"{name} blocks", FollowingEager(bundle, tapped.taps), tapped, tolerance, of_drafts, halves)


def _engines(bundle: Bundle) -> list[str]:
    """Engines that are compared unless one is named. OpenVINO's are not: they run the graphs of ``static``."""
    known = engines().items()
    names = [name for name, kind in known if kind.compared and kind.runs(bundle.manifest) and kind.is_ready(bundle)]
    return names or [default_engine(bundle)]  # which says what it lacks


def _compare(
    bundle: Bundle, pair: Pair, prompts: list[NDArray[np.int64]], progress: Callable[[str], None]
) -> list[Comparison]:
    comparisons: list[Comparison] = []
    for gear in bundle.manifest.gears:
        progress(f"{pair.name}, {gear.name}")
        comparisons += worst(c for prompt in prompts for c in compare_gear(pair, gear, prompt))
        # Rounding to int8 grows with depth, and is measured on texts alone; the bitwise step's caches lie in blocks.
        if not pair.engine.bitwise and (pair.following or not bundle.manifest.quantised):
            comparisons += worst(compare_far(pair, gear, prompts[0]))
        if isinstance(pair.engine, StaticEngine) and pair.engine.on_device.accepts:
            with in_parts(pair.engine):
                comparisons += compare_acceptance(pair, gear, prompts[0])
            if pair.engine.on_device.has_whole and not gear.looks_up:
                comparisons += worst(compare_whole(pair, gear, prompts[0]))
    if isinstance(pair.engine, StaticEngine):
        for graph in [*pair.engine.graphs, *pair.engine.drafting.extends]:
            if graph.kind == "prefill" or (graph.kind == "extend" and pair.drafts):
                progress(f"{pair.name}, {graph.name}")
                comparisons += compare_chunk(pair, graph, prompts[0])
    return comparisons


def _prove_graphs(bundle: Bundle, progress: Callable[[str], None]) -> None:
    """LoweringError if a device would read a file otherwise than the interpreter does, or would refuse it."""
    from draftwood.compiler.ge.graph import Graph  # as below
    from draftwood.compiler.ge.proofs import prove, prove_places
    from draftwood.compiler.ge.weights import bundle_index

    first, *others = (bundle_index(bundle.folder, of_rank) for of_rank in bundle.manifest.rank_sets("ge"))
    for signature in bundle.npu_graphs().graphs:
        progress(f"proof of {signature.name}")
        graph = Graph.load(bundle.folder / signature.file)
        prove(graph, signature, first)
        for index in others:
            prove_places(graph, signature, index)


def _graph_controls(bundle: Bundle, pair: Pair, prompt: NDArray[np.int64]) -> Iterator[Control]:
    from draftwood.tools.reference.ge import GeEngine  # needs the compiler's npu extra

    rows = {tree.name: tree.rows for tree in bundle.manifest.trees}
    gear = max(bundle.manifest.gears, key=lambda gear: rows[gear.tree])
    for fault, mutate in graph_mutations().items():
        broken = replace(pair, engine=GeEngine(bundle, mutate=mutate))
        tree = tree_of(pair.reference, gear, prompt)
        yield control(pair, gear, fault, ReferenceSteps(broken, gear, prompt, tree).tree(tree))


def _by_graph(comparisons: list[Comparison]) -> dict[str, dict[str, dict[str, Any]]]:
    """Graph -> engine -> the worst of all its quantities."""
    by_graph: dict[str, dict[str, dict[str, Any]]] = {}
    for c in comparisons:
        entry = by_graph.setdefault(c.graph, {}).setdefault(
            c.graphs, {"difference": 0.0, "quantity": c.quantity, "tolerance": c.tolerance, "ok": True}
        )
        if c.difference >= entry["difference"]:
            entry |= {"difference": c.difference, "quantity": c.quantity}
        entry["ok"] = entry["ok"] and c.ok
    return by_graph
