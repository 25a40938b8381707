"""``draftwood check``: does every graph of a bundle compute what eager PyTorch computes?

Equal argmax proves little, so logits, hidden states and caches are compared, on trees with branches behind
a real prefix, through several steps with commits of every kind. Controls that are wrong on purpose (another
mask, shifted positions, a misrouted path, a dropped write) must be told apart by the same comparison.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from draftwood.errors import RequestError

if TYPE_CHECKING:
    from draftwood.manifest import Gear
    from draftwood.runtime.bundle import Bundle
    from draftwood.runtime.cache import Cache
    from draftwood.runtime.engine import Engine
    from draftwood.trees import Topology

# fp32 graphs of one function differ by rounding and the order of sums: some 1e-6 of the largest value for the
# models tried. A wrong mask or position moves logits by 1e-1; 1e-4 lies well away from both.
TOLERANCE = 1e-4
STEPS = 6  # tree steps a prompt and gear: enough for commits in place, moved, and both in turn
PROMPT_TOKENS = 96


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """One quantity of one graph family at one gear; differences relative to the largest reference value."""

    gear: str
    graphs: str  # "onnx" (static) or "onnx-cpu"
    quantity: str
    difference: float
    tolerance: float
    ok: bool
    where: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Control:
    """A deliberate fault and how far it moved the logits; ``caught`` if past the tolerance."""

    gear: str
    fault: str
    difference: float
    caught: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", type=Path, metavar="BUNDLE")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help='JSON lines with a "prompt" (default: built in)')
    parser.add_argument("--limit", type=int, default=2, metavar="N", help="prompts to use (default 2)")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def main(args: argparse.Namespace) -> int:
    from draftwood.runtime.bundle import Bundle
    from draftwood.runtime.engine import share_threads

    share_threads()
    bundle = Bundle.open(args.bundle)
    report = check(bundle, list(sample_prompts(bundle, args.prompts, args.limit)), progress=_progress)
    (args.bundle / "check.json").write_text(json.dumps(report, indent=1) + "\n")
    if args.json:
        print(json.dumps(report))
    else:
        _print(report)
    return 0 if report["ok"] else 1


def check(bundle: Bundle, prompts: list[NDArray[np.int64]], progress=lambda _: None) -> dict:  # type: ignore[no-untyped-def]
    """The whole report: ``ok``, ``comparisons`` and ``controls``."""
    from draftwood.runtime.cpu_engine import CpuEngine
    from draftwood.runtime.static_engine import StaticEngine
    from draftwood.tools.eager_engine import EagerEngine

    eager = EagerEngine(bundle)
    candidates = {"onnx-cpu": CpuEngine(bundle), "onnx": StaticEngine(bundle)}
    comparisons: list[Comparison] = []
    controls: list[Control] = []
    for gear in bundle.manifest.gears:
        progress(gear.name)
        for name, engine in candidates.items():
            comparisons += _merged(c for prompt in prompts for c in _compare(eager, engine, name, gear, prompt))
        controls += _controls(eager, candidates["onnx-cpu"], gear, prompts[0])
    ok = all(c.ok for c in comparisons) and all(c.caught for c in controls)
    return {
        "ok": ok,
        "tolerance": TOLERANCE,
        "prompts": len(prompts),
        "comparisons": [asdict(c) for c in comparisons],
        "controls": [asdict(c) for c in controls],
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


def _difference(got: NDArray, want: NDArray) -> float:
    """Largest absolute difference, as a share of the largest reference value (at least 1)."""
    return float(np.abs(got - want).max() / max(1.0, float(np.abs(want).max())))


def _compare(eager: Engine, engine: Engine, name: str, gear: Gear, prompt: NDArray[np.int64]) -> Iterator[Comparison]:
    """Steps both engines in lockstep on the same tokens and the same commits."""

    def compared(quantity: str, got: NDArray, want: NDArray, where: str) -> Comparison:
        difference = _difference(got, want)
        return Comparison(
            gear=gear.name,
            graphs=name,
            quantity=quantity,
            difference=difference,
            tolerance=TOLERANCE,
            ok=difference <= TOLERANCE,
            where=where,
        )

    from draftwood.trees import tree_tokens

    topology, tree = eager.bundle.trees[gear.tree]
    caches = [e.new_cache(gear.slots) for e in (eager, engine)]
    want, got = (e.prefill(c, prompt) for e, c in zip((eager, engine), caches, strict=True))
    yield compared("logits", got.logits_RV, want.logits_RV, "prefill")
    text = [*prompt.tolist(), int(want.choice_R[0])]
    hidden = want.hidden_RH[-1:].copy()
    for step in range(STEPS):
        if topology.depth:
            (tokens, want_scores), (_, got_scores) = eager.draft(hidden), engine.draft(hidden)
            yield compared("draft scores", got_scores, want_scores, f"step {step}")
        tokens_T = tree_tokens(tree, text[-1], tokens if topology.depth else None)
        want, got = (e.verify(c, tokens_T, tree) for e, c in zip((eager, engine), caches, strict=True))
        yield compared("logits", got.logits_RV, want.logits_RV, f"step {step}")
        yield compared("hidden", got.hidden_RH, want.hidden_RH, f"step {step}")
        yield compared("choice", *_choices(got.choice_R, want.choice_R, want.logits_RV), f"step {step}")
        rows = _path(topology, step)
        for cache in caches:
            cache.commit(rows)
            cache.check()
        text += [*tokens_T[rows[1:]].tolist(), int(want.choice_R[rows[-1]])]
        hidden = want.hidden_RH[rows[-1] : rows[-1] + 1].copy()
    # One more row, so that the last commit is written; then the caches must hold what a fresh prefill holds.
    length = caches[1].length
    _settle(engine, caches[1], text[-1])
    fresh = eager.new_cache(gear.slots)
    eager.prefill(fresh, np.array(text[:length], np.int64))
    for i, (side, reference) in enumerate(zip(caches[1].sides, fresh.sides, strict=True)):
        side_name = f"layer {i // 2} {'value' if i % 2 else 'key'}"
        yield compared("cache after commit", side[:, :length], reference[:, :length], side_name)


def _path(topology: Topology, step: int) -> list[int]:
    """A root path to commit: over the steps every kind occurs, from the root alone to the last deepest row.

    Which path the teacher would accept does not matter here, only that all engines commit the same one.
    """
    row = (step * 7 + topology.rows - 1) % topology.rows
    rows = [row]
    while row:
        row = topology.parents[row]
        rows.append(row)
    return rows[::-1]


def _choices(got_R: NDArray, want_R: NDArray, logits_RV: NDArray) -> tuple[NDArray, NDArray]:
    """Logit of the token each side chose: equal unless a choice differs by more than a numeric tie."""
    rows = np.arange(len(want_R))
    return logits_RV[rows, got_R], logits_RV[rows, want_R]


def _settle(engine: Engine, cache: Cache, token: int) -> None:
    _, plain = engine.bundle.trees["plain"]
    engine.verify(cache, np.array([token], np.int64), plain)


def _merged(comparisons: Iterable[Comparison]) -> list[Comparison]:
    """The worst of each quantity."""
    worst: dict[str, Comparison] = {}
    for one in comparisons:
        if one.quantity not in worst or one.difference > worst[one.quantity].difference:
            worst[one.quantity] = one
    return list(worst.values())


def _controls(eager: Engine, engine: Engine, gear: Gear, prompt: NDArray[np.int64]) -> Iterator[Control]:
    """Faults put into the CPU graph's inputs, one at a time."""
    topology, tree = eager.bundle.trees[gear.tree]
    if topology.rows == topology.depth + 1:  # a chain: its mask is causal and its only path is contiguous
        return
    causal = np.tril(np.ones((tree.rows, tree.rows), np.bool_))
    swapped = np.arange(tree.rows)
    swapped[[1, -1]] = swapped[[-1, 1]]
    faults = {
        "causal mask instead of the tree's": replace(tree, mask=causal),
        "two mask rows swapped": replace(tree, mask=tree.mask[swapped] | np.eye(tree.rows, dtype=np.bool_)),
        "positions of draft rows shifted by one": replace(tree, depths=tree.depths + (tree.depths > 0)),
    }
    tokens_T = np.random.default_rng(0).integers(0, eager.bundle.manifest.dims.vocabulary, tree.rows)
    cache = eager.new_cache(gear.slots)
    eager.prefill(cache, prompt)
    want = eager.verify(cache, tokens_T, tree).logits_RV
    for fault, wrong in faults.items():
        cache = engine.new_cache(gear.slots)
        engine.prefill(cache, prompt)
        yield _control(gear, fault, engine.verify(cache, tokens_T, wrong).logits_RV, want)
    yield from _commit_controls(eager, engine, gear, prompt, tokens_T)


def _commit_controls(
    eager: Engine, engine: Engine, gear: Gear, prompt: NDArray[np.int64], tokens_T: NDArray[np.int64]
) -> Iterator[Control]:
    topology, tree = eager.bundle.trees[gear.tree]

    def next_logits(runner: Engine, route: list[int], drop: bool = False) -> NDArray:
        cache = runner.new_cache(gear.slots)
        runner.prefill(cache, prompt)
        runner.verify(cache, tokens_T, tree)
        cache.commit(route)
        if drop:
            cache.moved = ()
        return runner.verify(cache, tokens_T[:1], runner.bundle.trees["plain"][1]).logits_RV.copy()

    right = tree.paths[-1, : tree.depths[-1] + 1].tolist()
    want = next_logits(eager, right)
    for other in range(topology.rows - 1, right[-2], -1):
        if other != right[-1]:
            yield _control(gear, "path index misrouted", next_logits(engine, [*right[:-1], other]), want)
            break
    yield _control(gear, "commit's write dropped", next_logits(engine, right, drop=True), want)


def _control(gear: Gear, fault: str, got: NDArray, want: NDArray) -> Control:
    difference = _difference(got, want)
    return Control(gear=gear.name, fault=fault, difference=difference, caught=difference > TOLERANCE)


def _progress(what: str) -> None:
    print(f"checking {what}", file=sys.stderr, flush=True)


def _print(report: dict) -> None:
    quantities = ("logits", "hidden", "choice", "draft scores", "cache after commit")
    rows: dict[tuple[str, str], dict[str, dict]] = {}
    for c in report["comparisons"]:
        rows.setdefault((c["gear"], c["graphs"]), {})[c["quantity"]] = c
    print(
        f"largest difference from eager PyTorch, as a share of the largest value; {report['tolerance']:.0e} is allowed"
    )
    print(f"{'gear':24} {'graphs':9}" + "".join(f"{quantity:>20}" for quantity in quantities))
    for (gear, graphs), found in rows.items():
        cells = [
            f"{found[q]['difference']:.1e}{'' if found[q]['ok'] else ' !'}" if q in found else "" for q in quantities
        ]
        print(f"{gear:24} {graphs:9}" + "".join(f"{cell:>20}" for cell in cells))
    for c in report["comparisons"]:
        if not c["ok"]:
            print(f"DIFFERS: {c['gear']}, {c['graphs']} graphs: {c['quantity']} at {c['where']}: {c['difference']:.2e}")
    for c in report["controls"]:
        if not c["caught"]:
            print(f"NOT CAUGHT: {c['gear']}: {c['fault']} (difference {c['difference']:.2e})")
    caught = sum(c["caught"] for c in report["controls"])
    print(f"{caught} of {len(report['controls'])} deliberate faults caught")
    print("ok" if report["ok"] else "FAILED")
