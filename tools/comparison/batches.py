"""Does a launch of several texts compute for each what eager PyTorch computes for it alone?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from draftwood.manifest import Gear
from draftwood.runtime.engines.engine import Engine
from draftwood.runtime.engines.static import StaticEngine
from draftwood.runtime.speculation.sequence import SequenceState
from draftwood.runtime.speculation.step import Draft, TeacherOutput
from draftwood.tools.comparison import single
from draftwood.tools.comparison.compare import Comparison, Pair, compare_drafts, step_path
from draftwood.tools.comparison.faults import Control, control

# T tree rows

# Tree steps of every text: after a commit in place, and after one that is moved.
STEPS = 3
FAULT, DRAFT_FAULT = "another text's caches", "another text's draft"
# A text in a launch: its rows' outputs, and the graph that ran.
_Found = tuple[TeacherOutput, str]


def compare_texts(pair: Pair, count: int, prompts: Sequence[NDArray[np.int64]]) -> Iterator[Comparison | Control]:
    """Steps that ``count`` texts of different lengths share, with a tree of another gear for each, on random tokens.

    Graphs that draft for all of them are compared with eager drafts of each. In the end texts change places in a
    launch, and the comparison must notice that.
    """
    manifest = pair.engine.bundle.manifest
    slots = min(gear.slots for gear in manifest.gears)
    of_length = [gear for gear in manifest.gears if gear.slots == slots]
    gears = [gear for gear in of_length if gear.tree in pair.engine.bundle.trees]
    shared = [gear for gear in of_length if gear.draft and count <= pair.engine.drafting.most_texts(gear.draft)]
    shared = shared if pair.drafts else []
    random = np.random.default_rng(count)
    sides = [[engine.begin(slots) for _ in range(count)] for engine in pair.in_turn]
    for text in range(count):
        prompt = prompts[text % len(prompts)][: 9 + 5 * text]
        for engine, states in zip(pair.in_turn, sides, strict=True):
            engine.prefill(states[text], prompt)
    for step in range(STEPS):
        chosen = [gears[(text + step) % len(gears)] for text in range(count)]
        drafts = [_random_draft(pair.engine, gear, random) for gear in chosen]
        for number, gear in enumerate(shared):
            if number % STEPS == step:
                yield from _compare_drafts(pair, sides, gear, [int(draft.tokens_T[0]) for draft in drafts])
        for comparisons in _launched(pair, sides, sides[0], drafts, f"step {step}"):
            yield from comparisons
        if step == STEPS - 1:
            others = _launched(pair, sides, [*sides[0][1:], sides[0][0]], drafts, "others")
            yield control(pair, chosen[0], FAULT, others[0])
            return
        for text, draft in enumerate(drafts):
            for states in sides:
                states[text].commit(step_path(draft.tree, step))


def _launched(
    pair: Pair,
    sides: Sequence[Sequence[SequenceState]],
    states: Sequence[SequenceState],
    drafts: Sequence[Draft],
    where: str,
) -> list[list[Comparison]]:
    """One launch of ``states``, and text by text what the reference says of each of its own."""
    verified, compared = _verified(pair.engine, states, drafts), []
    for mine, state, draft, (got, graph) in zip(sides[0], sides[1], drafts, verified, strict=True):
        want = single.verify(pair.reference, state, draft.tokens_T, draft.tree)
        mine.branched(draft.tokens_T, got.features_RF)
        compared.append(list(pair.rows("", graph, got, want, f"{where}, {draft.tree.rows} rows")))
    return compared


def _compare_drafts(
    pair: Pair, sides: Sequence[Sequence[SequenceState]], gear: Gear, roots: Sequence[int]
) -> Iterator[Comparison | Control]:
    """One launch that drafts for all texts, and one in which they have changed places."""
    wants = [single.draft(pair.reference, state, gear, root) for state, root in zip(sides[1], roots, strict=True)]
    for state, root in zip(sides[0], roots, strict=True):
        state.root = root
    drafts = pair.engine.draft(sides[0], [gear] * len(roots))
    yield from compare_drafts(pair, gear, list(zip(wants, drafts, strict=True)))
    others = pair.engine.draft([*sides[0][1:], sides[0][0]], [gear] * len(roots))
    wrong = [(want, single.of_root(other, want)) for want, other in zip(wants, others, strict=True)]
    yield control(pair, gear, DRAFT_FAULT, compare_drafts(pair, gear, wrong))


def _random_draft(engine: Engine, gear: Gear, random: np.random.Generator) -> Draft:
    tree = engine.bundle.trees[gear.tree][1]
    tokens_T = random.integers(0, engine.bundle.manifest.dims.vocabulary, tree.rows)
    return Draft(tokens_T, np.zeros(0, np.float32), tree)


def _verified(engine: Engine, states: Sequence[SequenceState], drafts: Sequence[Draft]) -> list[_Found]:
    """One launch; results left on a device are read back."""
    if not isinstance(engine, StaticEngine):
        name = f"grouped-b{min(size for size in engine.batches if size >= len(states))}"
        outputs = engine.verify(states, drafts)
        return [(output.copied(), name) for output in outputs]
    texts = []
    for left, draft in zip(engine.on_device.verify(states, drafts), drafts, strict=True):
        assert left.launched is not None, "several texts are verified by launches of several"
        rows = slice(left.first, left.first + draft.tree.rows)
        logits_RV, features_RF = (
            engine.executor.read(left.buffers[name])[rows].astype(np.float32) for name in ("logits", "features")
        )
        texts.append((TeacherOutput(logits_RV, logits_RV.argmax(-1), features_RF), left.launched.graph.name))
    return texts
