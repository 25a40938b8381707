"""The quick proof of a first opening: every gear decodes one step, which must equal plain decoding.

It verifies a tree whose last row's path carries the plain text, with other tokens everywhere else. The tree must be
accepted along that path and no further, with the logits and caches of plain decoding. The step after it reads the rows
that the commit moved. So a wrong mask, position or write shows at once, whatever the drafter proposes. A prompt must
give the same through every graph that reads prompts. The engine itself shows how far rounding may move logits, and the
caches layer by layer (`draftwood.runtime.rounding`). In the first layers it moves little, however deep a model is.
``draftwood check`` proves more, and names differences.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftwood.errors import BundleError
from draftwood.manifest import BLOCK_SLOTS, Gear
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.engines.engine import Engine
from draftwood.runtime.policy import PLAIN
from draftwood.runtime.rounding import Rounding, logits_apart, measured, rows_apart, rows_of
from draftwood.runtime.speculation.sequence import SequenceState
from draftwood.runtime.speculation.step import Draft, HostParts, TeacherOutput, speculative_step
from draftwood.trees import TreeBuffers

# T tree rows, n tokens of a text, V vocabulary

PROMPT_TOKENS = 12
# After it trees reach over the border of a block: there a bitwise engine's sums change their form.
BORDER_TOKENS = BLOCK_SLOTS - 2
# Tokens of a prompt that are read one by one, to hold the smallest graph for prompts to it. Rounding is measured after
# as many.
SINGLE_TOKENS = 32


class PlainText(NamedTuple):
    """The result of plain decoding after the prompt: the tokens, the root first, and the rows of every cache. If the
    engine shows them, also the logits that each next token was drawn from."""

    tokens: list[int]
    logits_nV: NDArray[np.float32] | None
    caches_KnD: Sequence[NDArray[np.float32]] = ()

    def after(self, rows: int) -> PlainText:
        """Without the first tokens, and with all rows of the caches."""
        return self._replace(
            tokens=self.tokens[rows:], logits_nV=None if self.logits_nV is None else self.logits_nV[rows:]
        )


class Watched(HostParts):
    """An engine's parts of a step, accepted on the host, whose logits are kept; ``draft`` replaces the drafter's."""

    def __init__(self, engine: Engine, draft: Draft | None = None) -> None:
        self._engine, self._given = engine, draft

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
    prompts = (PROMPT_TOKENS, BORDER_TOKENS) if engine.bitwise else (PROMPT_TOKENS,)
    for slots, gears in by_length.items():
        rounding = _rounding(engine, slots, gears)
        for tokens in prompts:
            _prove_length(engine, slots, gears, tokens, rounding)
        _prove_prompts(engine, slots, gears, rounding)


def _prove_length(engine: Engine, slots: int, gears: list[Gear], tokens: int, rounding: Rounding | None) -> None:
    """The gears of one KV length, each after the same prompt, which leaves room for the largest tree."""
    trees = [tree for tree in engine.bundle.manifest.trees if tree.name in {gear.tree for gear in gears}]
    rows, deepest = max(tree.rows for tree in trees), max(tree.depth for tree in trees)
    tokens = max(1, min(tokens, slots - 1 - max(rows, deepest + 3)))
    state, prompt = engine.begin(slots), _prompt(engine.bundle, tokens)
    root = engine.start(state, prompt).tokens[0]
    plain = next(gear for gear in gears if gear.tree == PLAIN)
    text = _plain_text(engine, state, plain, root, deepest + 2)
    for gear in gears:
        fixed = engine.bundle.trees.get(gear.tree)
        if fixed is not None and fixed[1].depth:
            _return_to(state, len(prompt), root)
            accepted = _accepts(engine, state, gear, fixed[1], text, rounding)
            if accepted:
                # After the commit: the moved rows are read.
                after = _plain_text(engine, state, plain, state.root, 1)
                _same(engine, gear, after, text.after(accepted), rounding)
        _return_to(state, len(prompt), root)
        gained = list(engine.step([state], [gear])[0].tokens)
        _same(engine, gear, PlainText([root, *gained], None), text, rounding)


def _rounding(engine: Engine, slots: int, gears: list[Gear]) -> Rounding | None:
    """The differences that rounding explains; None if bits are held, or the engine shows tokens alone."""
    if engine.bitwise:
        return None
    plain, prompt = next(gear for gear in gears if gear.tree == PLAIN), _prompt(engine.bundle, SINGLE_TOKENS)

    def begin() -> SequenceState:
        state = engine.begin(slots)
        engine.start(state, prompt)
        return state

    def step(state: SequenceState) -> NDArray[np.float32]:
        watched = Watched(engine)
        speculative_step(watched, [state], [plain])
        return watched.logits_TV[0]

    return measured(engine, begin, step)


def _prove_prompts(engine: Engine, slots: int, gears: list[Gear], rounding: Rounding | None) -> None:
    """The graphs for prompts, each against the next smaller one; the smallest against single tokens."""
    plain, smaller = next(gear for gear in gears if gear.tree == PLAIN), 1
    for rows in engine.launches(slots):
        count = min(rows, slots - 2)
        tokens_n = _prompt(engine.bundle, count if smaller > 1 else min(count, SINGLE_TOKENS))
        want, got = (_read(engine, slots, plain, tokens_n, launch) for launch in (smaller, rows))
        if wrong := _other(got, want, rounding):
            what = f"reading a prompt {rows} tokens a launch at KV length {slots} gives {wrong} {smaller} a launch"
            raise _wrong(engine.bundle, what)
        smaller = rows


def _read(engine: Engine, slots: int, plain: Gear, tokens_n: NDArray[np.int64], launch: int) -> PlainText:
    """A prompt that was read ``launch`` tokens at a time, and one token more, the same always."""
    state = engine.begin(slots)
    for at in range(0, len(tokens_n), launch):
        logits_V = engine.append(state, tokens_n[at : at + launch]).logits_RV[-1].copy()
    after = _plain_text(engine, state, plain, int(tokens_n[0]), 1)
    assert after.logits_nV is not None, "an engine in stages shows its logits"
    return after._replace(logits_nV=np.stack((logits_V, after.logits_nV[0])))


def _return_to(state: SequenceState, length: int, root: int) -> None:
    state.rollback(length)
    state.root = root


def _plain_text(engine: Engine, state: SequenceState, plain: Gear, root: int, steps: int) -> PlainText:
    tokens, rows = [root], []
    state.root = root
    for _ in range(steps):
        watched = Watched(engine)
        speculative_step(watched, [state], [plain])
        rows.append(watched.logits_TV[0])
        tokens.append(state.root)
    return PlainText(tokens, np.stack(rows) if rows else None, _caches(engine, state))


def _caches(engine: Engine, state: SequenceState) -> list[NDArray[np.float32]]:
    """The text's rows of every cache that lies in the host's memory, token after token."""
    host = not engine.bitwise and isinstance(state.kv.buffers[0], np.ndarray)
    return [rows.copy() for rows in rows_of(state)] if host else []


def _accepts(
    engine: Engine,
    state: SequenceState,
    gear: Gear,
    tree: TreeBuffers,
    text: PlainText,
    rounding: Rounding | None,
) -> int:
    """A tree that holds the text along its last row's path, and nothing else of it, is accepted along that path.

    Returns how many rows that are; they are committed. 0 if rounding alone may have decided otherwise.
    """
    row, vocabulary = tree.rows - 1, engine.bundle.manifest.dims.vocabulary
    path = tree.paths[row, : tree.depths[row] + 1].tolist()
    # Elsewhere a token that the teacher does not draw: one past the one it draws.
    tokens_T = (np.array(text.tokens, np.int64)[tree.depths] + 1) % vocabulary
    tokens_T[path] = text.tokens[: len(path)]
    watched = Watched(engine, Draft(tokens_T, np.zeros(0, np.float32), tree))
    (done,) = speculative_step(watched, [state], [gear])
    got = PlainText([int(tokens_T[0]), *done.tokens], watched.logits_TV[path])
    if not _same(engine, gear, got, text, rounding):
        return 0
    if done.path != tuple(tree.ranks[path[1:]].tolist()):
        raise _differs(engine.bundle, gear, f"accepts {done.path} of its tree; expected the path to row {row}")
    return len(path)


def _same(engine: Engine, gear: Gear, got: PlainText, want: PlainText, rounding: Rounding | None) -> bool:
    """Refuses tokens, logits or caches that are not the beginning of the plain text's. False if another token was drawn
    that rounding explains: then another text follows.
    """
    expected = want.tokens[: len(got.tokens)]
    if wrong := _other(got, want, rounding):
        raise _differs(engine.bundle, gear, f"gives {wrong} plain decoding's")
    if got.tokens == expected:
        return True
    if not _tie(got, want, rounding):
        raise _differs(engine.bundle, gear, f"gives tokens {got.tokens}; plain decoding gives {expected}")
    return False


def _tie(got: PlainText, want: PlainText, rounding: Rounding | None) -> bool:
    """Whether the plain text's lead over the first other token is one that rounding of two logits may turn."""
    at = next(at for at, pair in enumerate(zip(got.tokens, want.tokens, strict=False)) if pair[0] != pair[1])
    if rounding is None or want.logits_nV is None or not at:
        return False
    logits_V = want.logits_nV[at - 1]
    lead = float(logits_V[want.tokens[at]] - logits_V[got.tokens[at]])
    return lead <= 2 * rounding.logits * max(1.0, float(np.abs(logits_V).max()))


def _other(got: PlainText, want: PlainText, rounding: Rounding | None) -> str:
    """How logits or caches differ by more than they may, in words that go before the name of the right ones. Empty if
    they do not."""
    if got.logits_nV is None or want.logits_nV is None:
        return ""
    want_nV = want.logits_nV[: len(got.logits_nV)]
    if rounding is None:
        same = np.array_equal(got.logits_nV.view(np.int32), want_nV.view(np.int32))
        return "" if same else "logits with other bits on this machine than"
    for number, allowed in enumerate(rounding.caches if got.caches_KnD else ()):
        rows = got.caches_KnD[number].shape[1]
        apart = rows_apart(got.caches_KnD[number], want.caches_KnD[number][:, :rows])
        if apart > allowed:
            what = f"{('keys', 'values')[number % 2]} of layer {number // 2}"
            return f"{what} that differ by {apart:.1e} of 1, {allowed:.0e} allowed by what rounding moves here, from"
    apart = logits_apart(got.logits_nV, want_nV)
    what = f"{apart:.1e} of 1, {rounding.logits:.0e} allowed by what rounding moves here, from"
    return "" if apart <= rounding.logits else f"logits that differ by {what}"


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
