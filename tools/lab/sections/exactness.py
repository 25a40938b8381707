"""Exactness, beyond equal texts: caches behind commits, the sampler's law, and what a larger tree may do.

Equal texts and their ties are counted over all rows of a run, and stand on the report's first screen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftwood.runtime.proof import TOLERANCE
from draftwood.runtime.speculation.sampling import Sampling, draw
from draftwood.tools.lab.opened import Lab
from draftwood.tools.lab.section import Block, Row, Section, Table, Task
from draftwood.tools.lab.suite import Ask, Suite
from draftwood.trees import Topology, TreeBuffers, tensorize, walk

NAME = "exactness"
STEPS = 24
# Of the sampler's test: tokens, texts a tree, and the chance that it fails though nothing is wrong.
VOCABULARY, TEXTS, CHANCE = 4, 3000, 1e-6
CHECKS = ("caches", "sampler", "growth")


def tasks(ask: Ask, suite: Suite) -> Iterator[Task]:
    """Caches of every drafter at every size; the rules of trees once."""
    for size, drafter in product(ask.sizes, ask.drafters):
        yield Task(NAME, {"check": "caches", "size": size, "drafter": drafter}, 3.0)
    for check in CHECKS[1:]:
        yield Task(NAME, {"check": check}, 8.0)


def prepare(task: Task, ask: Ask, lab: Lab) -> None:
    """Opens the bundle."""
    if task.at["check"] == "caches":
        lab.planned(task.at["size"], task.at["drafter"])


def measure(task: Task, ask: Ask, lab: Lab) -> dict[str, Any]:
    """Cases looked at, how many failed, and the worst figure with what is allowed of it."""
    return {"caches": caches, "sampler": sampler, "growth": growth}[task.at["check"]](task, lab)


def caches(task: Task, lab: Lab) -> dict[str, Any]:
    """Rows of the teacher's caches behind tree steps and their commits, against a fresh prefill of the same text."""
    opened = lab.planned(task.at["size"], task.at["drafter"])
    engine, bundle = opened.engine, opened.engine.bundle
    plain = next(gear for gear in bundle.manifest.gears if gear.draft is None)
    worst, cases = 0.0, 0
    for gear in (gear for gear in bundle.manifest.gears if gear.draft and gear.slots == plain.slots):
        assert bundle.tokenizer is not None, "the demo teacher has a tokenizer"
        ids = bundle.tokenizer.encode(lab.prompts[0].text)
        state = engine.begin(plain.slots)
        text = [*ids, *engine.start(state, np.array(ids, np.int64)).tokens]
        for _ in range(STEPS):
            text += engine.step([state], gear)[0].tokens
        engine.step([state], plain)  # writes what the last tree's commit has chosen
        fresh, held = engine.begin(plain.slots), len(text) - 1
        engine.prefill(fresh, np.array(text[:held], np.int64))
        for ours, theirs in zip(state.kv.buffers, fresh.kv.buffers, strict=True):
            worst = max(worst, float(np.abs(ours[:, :held] - theirs[:, :held]).max()))
            cases += held * ours.shape[0]
    return {"cases": cases, "failed": int(worst > TOLERANCE), "worst": worst, "allowed": TOLERANCE}


def sampler(task: Task, lab: Lab) -> dict[str, Any]:
    """Pairs of tokens that decoding with every small tree emits, against the teacher's own law: chi-square.

    The teacher is a table of logits by the token before. A pair takes one step or two, as the tree has it.
    """
    logits_VV = np.random.default_rng(0).normal(size=(VOCABULARY, VOCABULARY)).astype(np.float32)
    law_VV = _softmax(logits_VV)
    expected = TEXTS * law_VV[0][:, None] * law_VV
    trees = list(small_trees(3))
    least = 1.0
    failed = 0
    for tree in trees:
        counts_VV = np.zeros((VOCABULARY, VOCABULARY))
        buffers = tensorize(tree)
        for seed in range(TEXTS):
            first, second = _pair(buffers, logits_VV, Sampling(temperature=1.0, seed=seed))
            counts_VV[first, second] += 1
        chance = chi_square_chance(float(((counts_VV - expected) ** 2 / expected).sum()), VOCABULARY**2 - 1)
        least = min(least, chance)
        failed += chance < CHANCE / len(trees)
    return {"cases": len(trees) * TEXTS, "failed": failed, "worst": least, "allowed": CHANCE / len(trees)}


def growth(task: Task, lab: Lab) -> dict[str, Any]:
    """Adding a node to a tree never shortens what is accepted: every small tree, every draw of a small vocabulary."""
    cases = failed = 0
    drafted_IK = np.array([[0, 1, 2], [1, 2, 0], [2, 0, 1]])
    for larger in small_trees(4):
        for smaller in _without_a_leaf(larger):
            for drawn in product(range(VOCABULARY), repeat=larger.depth + 1):
                lengths = [len(_walked(tree, drafted_IK, drawn)) for tree in (smaller, larger)]
                cases, failed = cases + 1, failed + (lengths[0] > lengths[1])
    return {"cases": cases, "failed": failed, "worst": 0.0, "allowed": 0.0}


def small_trees(nodes: int, width: int = 2, depth: int = 3) -> Iterator[Topology]:
    """Every tree of 1 to ``nodes`` nodes within ``width`` ranks and ``depth`` levels."""
    seen: set[frozenset[tuple[int, ...]]] = set()
    layer: set[frozenset[tuple[int, ...]]] = {frozenset()}
    for _ in range(nodes):
        layer = {
            paths | {(*parent, rank)}
            for paths in layer
            for parent in ((), *paths)
            for rank in range(width)
            if len(parent) < depth and (*parent, rank) not in paths
        }
        seen |= layer
    for paths in sorted(seen, key=lambda paths: (len(paths), sorted(paths))):
        yield Topology.from_paths(sorted(paths))


def _without_a_leaf(tree: Topology) -> Iterator[Topology]:
    for leaf in tree.paths:
        if tree.nodes > 1 and not any(path[:-1] == leaf for path in tree.paths):
            yield Topology.from_paths(path for path in tree.paths if path != leaf)


def _walked(tree: Topology, drafted_IK: NDArray[np.int64], drawn: Sequence[int]) -> tuple[int, ...]:
    buffers = tensorize(tree)
    tokens_T = np.array([0, *(drafted_IK[len(path) - 1, path[-1]] for path in tree.paths)])
    return walk(buffers, tokens_T, lambda row, depth: drawn[depth]).rows


def _pair(tree: TreeBuffers, logits_VV: NDArray[np.float32], sampling: Sampling) -> tuple[int, int]:
    """The two tokens behind token 0, decoded with the tree; candidates of a level are the tokens by number."""

    def step(root: int, position: int) -> list[int]:
        tokens_T = np.where(tree.depths > 0, (tree.ranks + tree.depths) % VOCABULARY, root)
        accepted = walk(tree, tokens_T, lambda row, depth: draw(logits_VV[tokens_T[row]], sampling, position + depth))
        return [*tokens_T[list(accepted.rows[1:])].tolist(), accepted.bonus]

    emitted = [0]
    while len(emitted) < 3:
        emitted += step(emitted[-1], len(emitted))
    return emitted[1], emitted[2]


def _softmax(logits_VV: NDArray[np.float32]) -> NDArray[np.float64]:
    raised = np.exp(logits_VV.astype(np.float64) - logits_VV.max(1, keepdims=True))
    found: NDArray[np.float64] = raised / raised.sum(1, keepdims=True)
    return found


def chi_square_chance(statistic: float, freedom: int) -> float:
    """The chance of a statistic so large or larger under the law."""
    import torch

    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


WHAT: dict[str, tuple[str, str]] = {
    "caches": ("Cache rows behind tree steps and commits equal those of a fresh prefill", "largest difference"),
    "sampler": ("Pairs of sampled tokens follow the teacher's law with every tree of up to 3 nodes", "least chance"),
    "growth": ("Adding a node to a tree of up to 4 never shortens what is accepted", "-"),
}


def show(rows: list[Row]) -> Iterator[Block]:
    """A line a check."""
    lines = []
    for row in rows:
        found, at = row["found"], row["at"]
        what, of = WHAT[at["check"]]
        where = " ".join(str(at[name]) for name in ("size", "drafter") if name in at)
        form: Callable[[float], str] = lambda value: f"{value:.1e}" if value else "-"  # noqa: E731
        says = [found["cases"], found["failed"], of, form(found["worst"]), form(found["allowed"])]
        lines.append([what, where or "-", *says])
    columns = ("check", "where", "cases", "failed", "figure", "worst", "allowed")
    yield Table("Promises", columns, lines, [[row["key"]] for row in rows])


SECTION = Section(
    name=NAME,
    title="Exactness",
    question="Does what equal texts rest on hold: caches, the sampler's law, trees?",
    source="EAGLE-Pangu's invariants; Draftwood",
    tasks=tasks,
    prepare=prepare,
    measure=measure,
    show=show,
)
