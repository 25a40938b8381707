"""The quick proof of a first opening: every gear decodes one step, and it must be what plain decoding says.

A tree whose last row's path carries the plain text, and other tokens everywhere else, must be accepted along that
path and no further, with the logits of plain decoding; the step behind it reads what the commit moved. So a mask, a
position or a write that is wrong shows at once, whatever the drafter proposes. A prompt must give the same through
every graph that reads prompts. ``draftwood check`` proves more, and says what differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftwood.errors import BundleError
from draftwood.manifest import BLOCK_SLOTS, Gear
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.engines import Engine, StagedEngine
from draftwood.runtime.policy import PLAIN
from draftwood.runtime.speculation.sequence import SequenceState
from draftwood.runtime.speculation.step import Draft, HostParts, TeacherOutput, speculative_step
from draftwood.trees import TreeBuffers

# T tree rows, n tokens of a text, V vocabulary

PROMPT_TOKENS = 12
# Behind it trees reach over the border of a block, where a bitwise engine's sums change their form.
BORDER_TOKENS = BLOCK_SLOTS - 2
# Tokens of a prompt that are read one by one, to hold the smallest graph for prompts to it.
SINGLE_TOKENS = 32
# Share of the largest value by which rows of one function may differ, by rounding and the order of sums: some 1e-6 in
# fp32 for the models tried, and a few roundings of 4e-3 in half precision; a wrong mask or position moves logits by
# 1e-1.
TOLERANCE, HALF_TOLERANCE = 1e-4, 3e-2
# Where rows are rounded to int8, a last bit that differs is a whole step of 127 now and then, and what follows from it:
# measured 2.4e-2 at most (demo teacher, 512 slots). The faults that ``check`` plants moved some value by 1e-1 or more.
QUANTISED_TOLERANCE = 5e-2


class PlainText(NamedTuple):
    """What plain decoding gives behind the prompt: tokens, the root first, and where the engine shows them the logits
    that each next one was drawn from."""

    tokens: list[int]
    logits_nV: NDArray[np.float32] | None


class Watched(HostParts):
    """An engine's parts of a step, accepted on the host, whose logits are kept; ``given`` is taken for the draft."""

    def __init__(self, engine: StagedEngine, given: Draft | None = None) -> None:
        self._engine, self._given = engine, given

    def draft(self, states: Sequence[SequenceState], gears: Sequence[Gear]) -> list[Draft]:
        return [self._given] if self._given else self._engine.draft(states, gears)

    def verify(self, states: Sequence[SequenceState], drafts: Sequence[Draft]) -> list[TeacherOutput]:
        outputs = self._engine.verify(states, drafts)
        self.logits_TV = outputs[0].logits_RV.copy()
        return outputs


def prove(engine: Engine) -> None:
    """Every gear of the engine's bundle against plain decoding, greedy, on a fixed prompt.

    Raises:
        BundleError: a gear that gives other tokens or other logits; it is named.
    """
    by_length: dict[int, list[Gear]] = {}
    for gear in engine.bundle.manifest.gears:
        by_length.setdefault(gear.slots, []).append(gear)
    prompts = (PROMPT_TOKENS, BORDER_TOKENS) if _exact(engine) else (PROMPT_TOKENS,)
    for slots, gears in by_length.items():
        for tokens in prompts:
            _prove_length(engine, slots, gears, tokens)
        if isinstance(engine, StagedEngine):
            _prove_prompts(engine, slots, gears)


def _exact(engine: Engine) -> bool:
    """Whether logits must be equal to the bit."""
    return isinstance(engine, StagedEngine) and engine.bitwise


def _prove_length(engine: Engine, slots: int, gears: list[Gear], tokens: int) -> None:
    """The gears of one KV length, each behind the same prompt."""
    state, prompt = engine.begin(slots), _prompt(engine.bundle, tokens)
    root = engine.start(state, prompt).tokens[0]
    plain = next(gear for gear in gears if gear.tree == PLAIN)
    deepest = max(tree.depth for tree in engine.bundle.manifest.trees)
    text = _plain_text(engine, state, plain, root, deepest + 2)
    for gear in gears:
        fixed = engine.bundle.trees.get(gear.tree)
        if fixed is not None and fixed[1].depth and isinstance(engine, StagedEngine):
            _return_to(state, len(prompt), root)
            accepted = _accepts(engine, state, gear, fixed[1], text)
            # Behind the commit: what was moved is read.
            behind = PlainText(text.tokens[accepted:], None if text.logits_nV is None else text.logits_nV[accepted:])
            _same(engine, gear, _plain_text(engine, state, plain, state.root, 1), behind)
        _return_to(state, len(prompt), root)
        gained = list(engine.step([state], [gear])[0].tokens)
        _same(engine, gear, PlainText([root, *gained], None), text)


def _prove_prompts(engine: StagedEngine, slots: int, gears: list[Gear]) -> None:
    """The graphs for prompts, each against the next smaller one; the smallest against single tokens."""
    plain, smaller = next(gear for gear in gears if gear.tree == PLAIN), 1
    for rows in engine.launches(slots):
        count = min(rows, slots - 2)
        tokens_n = _prompt(engine.bundle, count if smaller > 1 else min(count, SINGLE_TOKENS))
        want_2V, got_2V = (_read(engine, slots, plain, tokens_n, launch) for launch in (smaller, rows))
        # Up to 1.5e-2 at 500 M and 1.5 B on an EPYC, in rows read alone against many (inferred: attention sums them in
        # another order). The rows of gears do not differ so, and are held to the narrow tolerance.
        if wrong := _other_logits(engine, got_2V, want_2V, engine.bundle.manifest.quantised):
            what = f"reading a prompt {rows} tokens a launch at KV length {slots} gives {wrong} {smaller} a launch"
            raise _wrong(engine.bundle, what)
        smaller = rows


def _read(
    engine: StagedEngine, slots: int, plain: Gear, tokens_n: NDArray[np.int64], launch: int
) -> NDArray[np.float32]:
    """Logits [2, V] behind a prompt that was read ``launch`` tokens at a time, and behind one more, the same always."""
    state = engine.begin(slots)
    for at in range(0, len(tokens_n), launch):
        logits_V = engine.append(state, tokens_n[at : at + launch]).logits_RV[-1].copy()
    state.root = int(tokens_n[0])
    behind = _plain_text(engine, state, plain, state.root, 1)
    assert behind.logits_nV is not None, "an engine in stages shows its logits"
    return np.stack((logits_V, behind.logits_nV[0]))


def _return_to(state: SequenceState, length: int, root: int) -> None:
    state.rollback(length)
    state.root = root


def _plain_text(engine: Engine, state: SequenceState, plain: Gear, root: int, steps: int) -> PlainText:
    tokens, rows = [root], []
    for _ in range(steps):
        if isinstance(engine, StagedEngine):
            watched = Watched(engine)
            speculative_step(watched, [state], [plain])
            rows.append(watched.logits_TV[0])
        else:
            engine.step([state], [plain])
        tokens.append(state.root)
    return PlainText(tokens, np.stack(rows) if rows else None)


def _accepts(engine: StagedEngine, state: SequenceState, gear: Gear, tree: TreeBuffers, text: PlainText) -> int:
    """A tree that holds the text along its last row's path, and nothing else of it, is accepted along that path.

    Returns how many rows that are; they are committed.
    """
    row, vocabulary = tree.rows - 1, engine.bundle.manifest.dims.vocabulary
    path = tree.paths[row, : tree.depths[row] + 1].tolist()
    # Elsewhere a token that the teacher does not draw: one past the one it draws.
    tokens_T = (np.array(text.tokens, np.int64)[tree.depths] + 1) % vocabulary
    tokens_T[path] = text.tokens[: len(path)]
    watched = Watched(engine, Draft(tokens_T, np.zeros(0, np.float32), tree))
    (done,) = speculative_step(watched, [state], [gear])
    _same(engine, gear, PlainText([int(tokens_T[0]), *done.tokens], watched.logits_TV[path]), text)
    if done.path != tuple(tree.ranks[path[1:]].tolist()):
        raise _differs(engine.bundle, gear, f"accepts {done.path} of its tree; expected the path to row {row}")
    return len(path)


def _same(engine: Engine, gear: Gear, got: PlainText, want: PlainText) -> None:
    """Refuses tokens or logits that are not the beginning of the plain text's."""
    expected = want.tokens[: len(got.tokens)]
    if got.tokens != expected:
        raise _differs(engine.bundle, gear, f"gives tokens {got.tokens}; plain decoding gives {expected}")
    if got.logits_nV is None or want.logits_nV is None:
        return
    assert isinstance(engine, StagedEngine)
    if wrong := _other_logits(engine, got.logits_nV, want.logits_nV[: len(got.logits_nV)]):
        raise _differs(engine.bundle, gear, f"gives {wrong} plain decoding's")


def _other_logits(
    engine: StagedEngine, got_nV: NDArray[np.float32], want_nV: NDArray[np.float32], rounded: bool = False
) -> str:
    """How logits differ by more than they may, to be read before whose the right ones are; empty where they do not.

    ``rounded`` allows for rows that are rounded to int8 behind sums in another order.
    """
    if _exact(engine):
        same = np.array_equal(got_nV.view(np.int32), want_nV.view(np.int32))
        return "" if same else "logits with other bits on this machine than"
    apart = float(np.abs(got_nV - want_nV).max() / max(1.0, float(np.abs(want_nV).max())))
    allowed = max(HALF_TOLERANCE if engine.half else TOLERANCE, QUANTISED_TOLERANCE if rounded else 0.0)
    return "" if apart <= allowed else f"logits that differ by {apart:.1e} of 1, {allowed:.0e} allowed, from"


def _differs(bundle: Bundle, gear: Gear, what: str) -> BundleError:
    return _wrong(bundle, f"gear {gear.name} {what}")


def _wrong(bundle: Bundle, what: str) -> BundleError:
    return BundleError(
        f"{bundle.folder}: {what}; the bundle does not hold together: build it again, or let"
        f" draftwood check {bundle.folder} say where it differs"
    )


def _prompt(bundle: Bundle, tokens: int) -> NDArray[np.int64]:
    """Ids spread over the vocabulary, the same every time."""
    vocabulary = bundle.manifest.dims.vocabulary
    return (np.arange(1, tokens + 1, dtype=np.int64) * 7919) % vocabulary
