"""What a part of the method is worth, everything else equal: fused graphs against eager PyTorch, trees of equal rows.

``engines``: one bundle and one tree on the CPU's engine, on static graphs as an accelerator runs them, and on the eager
reference; a step's stages in each are EAGLE-Pangu's two modes, performance and reference. ``trees``: a tree that
nothing has shaped, one that the drafter chooses at every step, and a planned one, at equal rows on one engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import msgspec

from draftwood.runtime.engines import Engine
from draftwood.tools import demo
from draftwood.tools.demo import counted
from draftwood.tools.evaluate import asked
from draftwood.tools.evaluate.bundles import Trees
from draftwood.tools.evaluate.lab import Lab
from draftwood.tools.evaluate.protocol import PLAIN, Way, warm_up
from draftwood.tools.evaluate.protocol import measure as measured
from draftwood.tools.evaluate.section import Section, Task
from draftwood.tools.evaluate.sections import shapes
from draftwood.tools.evaluate.sections.ablations_shown import BUDGET, ENGINES, FIXED, MODES, PLANNED, TREES, show
from draftwood.tools.evaluate.suite import Ask, Suite
from draftwood.trees import Topology
from draftwood.trees.spec import Budget

NAME = "ablations"
PROMPTS = 4
TOKEN_SECONDS = {"native": 0.03, "110m": 0.25, "500m": 1.2}


def tasks(ask: Ask, suite: Suite) -> Iterator[Task]:
    """A prompt on every engine at every size, then with every tree at the first size."""
    for size, drafter in product(ask.sizes, ask.drafters):
        for prompt in range(ask.limit_of(size) or PROMPTS):
            at = {"ablation": ENGINES, "size": size, "drafter": drafter, "temperature": 0.0, "prompt": prompt}
            yield Task(NAME, at, TOKEN_SECONDS[size] * ask.max_new_tokens * ask.rounds)
    first = msgspec.structs.replace(ask, sizes=ask.sizes[:1], temperatures=(0.0,))
    for task in shapes.tasks_of(NAME, trees_of, first):
        yield Task(NAME, {"ablation": TREES, **task.at}, task.weight)


def trees_of(drafter: str, ask: Ask) -> Trees:
    """Trees of as many nodes as ``nodes`` says first; a drafter that ranks levels chooses none."""
    nodes = ask.nodes[0]
    found: list[tuple[str, Topology | Budget]] = [(PLAIN, Topology.plain()), (FIXED, binary(nodes))]
    if demo.follows_nodes(drafter):
        found.append((BUDGET, Budget(nodes, shapes.DEPTH, shapes.WIDTH)))
    return (*found, (PLANNED, counted(drafter, sampled=False).rank_paths().best_tree(nodes)))


def binary(nodes: int) -> Topology:
    """Two candidates a node, level by level: no counting has shaped it."""
    levels = (product(range(2), repeat=depth) for depth in range(1, nodes.bit_length() + 1))
    return Topology.from_paths([path for level in levels for path in level][:nodes])


def ways_of(task: Task, ask: Ask, lab: Lab) -> dict[str, Way]:
    """Plain decoding and the tree that promises most, on every engine; the CPU's plain decoding first."""
    opened = lab.planned(task.at["size"], task.at["drafter"])
    found = {PLAIN: Way(opened.engine, opened.policies(PLAIN))}
    for engine, policy in product(MODES, (PLAIN, "tree")):
        if (engine, policy) != ("cpu", PLAIN):
            found[f"{engine} {policy}"] = Way(lab.on(opened, engine), opened.policies(policy))
    return found


def prepare(task: Task, ask: Ask, lab: Lab) -> None:
    """Opens bundles and engines and decodes a text with each way once."""
    if task.at["ablation"] == TREES:
        shapes.prepare(trees_of, task, ask, lab)
        return
    place = (NAME, *list(task.at.values())[:-1])
    if lab.warmed != place:
        ways = ways_of(task, ask, lab)
        warm_up(ways, _ids(task, ask, lab, ways[PLAIN].engine), asked.options_of(task, ask, lab))
        lab.warmed = place


def measure(task: Task, ask: Ask, lab: Lab) -> dict[str, Any]:
    """The prompt with every way; answers go on past the end token."""
    if task.at["ablation"] == TREES:
        return shapes.measure(trees_of, task, ask, lab)
    ways, opened = ways_of(task, ask, lab), lab.planned(task.at["size"], task.at["drafter"])
    ids, options = _ids(task, ask, lab, opened.engine), asked.options_of(task, ask, lab)
    found, _ = measured(ways, ids, options, ask.rounds, task.at["prompt"])
    return {"ways": found, "tree": opened.tree, "bundle": opened.digest[:16]}


def _ids(task: Task, ask: Ask, lab: Lab, engine: Engine) -> list[int]:
    return asked.ids_of(asked.prompt_of(task, ask, lab, PROMPTS), engine)


SECTION = Section(
    name=NAME,
    title="Ablations",
    question="What is each part of the method worth by itself?",
    source="EAGLE-Pangu, fused against eager execution, stages in performance and reference mode; EAGLE-2's budget",
    tasks=tasks,
    prepare=prepare,
    measure=measure,
    show=show,
)
