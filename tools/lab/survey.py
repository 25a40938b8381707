"""A trace that policies can be replayed over: plain decoding, with a draft at every position that is only looked at.

A decoding shows what its gears drafted at the places where its steps began. To say what another gear would have done,
a draft is needed at every place: so the text is decoded plainly, the widest gear drafts before every step, and the
teacher's own next tokens say which rank path it would have taken. A drafter that ranks levels is known in full; of
another one, what its widest tree has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from draftwood.runtime.trace import StepEvent, Trace
from draftwood.tools.lab.counting import widest_gear

if TYPE_CHECKING:
    from draftwood.planned import StepTime
    from draftwood.runtime.bundle import Bundle
    from draftwood.runtime.decoding import Options
    from draftwood.runtime.engines import StagedEngine
    from draftwood.runtime.speculation.step import Draft


def survey(engine: StagedEngine, prompt: Sequence[int], options: Options, times: Sequence[StepTime]) -> Trace:
    """The trace of one text, which has everything that a replay needs in its header."""
    from draftwood.runtime.decoding import Decoding
    from draftwood.runtime.policy import policy_for
    from draftwood.runtime.sharing import advance

    bundle = engine.bundle
    wide = bundle.gear(widest_gear(bundle))
    text = Decoding(engine, prompt, options, policy_for(bundle))
    text.start()
    room = wide.slots - 1 - next(tree.rows for tree in bundle.manifest.trees if tree.name == wide.tree)
    drafts: list[tuple[int, Draft]] = []
    while not text.finished and text.state.length <= room:
        drafts.append((text.state.length, engine.draft([text.state], [wide])[0]))
        advance(engine, [text])
    trace = Trace({"survey": _header(bundle, options, times)})
    for step, (length, draft) in enumerate(drafts):
        trace.add(_event(wide.name, step, length, draft, text.tokens[step + 1 :]))
    return trace


def _header(bundle: Bundle, options: Options, times: Sequence[StepTime]) -> dict[str, Any]:
    """The gears with their trees, and what a policy knows beforehand."""
    manifest, rows = bundle.manifest, {tree.name: tree.rows for tree in bundle.manifest.trees}
    gears = []
    for gear in manifest.gears:
        trees = [_paths(bundle, name) for name in (gear.tree, *gear.class_trees)]
        gears.append({"gear": gear, "rows": rows[gear.tree], "trees": trees})
    value = {
        "greedy": options.sampling.greedy,
        "gears": gears,
        "times": times,
        "planning": manifest.planning,
        "catches_up": bool(manifest.drafter and manifest.drafter.layers),
    }
    found: dict[str, Any] = msgspec.to_builtins(value)
    return found


def _paths(bundle: Bundle, name: str) -> list[tuple[int, ...]]:
    return list(bundle.trees[name][0].paths)


def _event(gear: str, step: int, length: int, draft: Draft, following: Sequence[int]) -> StepEvent:
    """``path`` are the ranks of the next tokens as far as they are known, ``rank`` what ended it."""
    path, rank = _ranked(draft, following) if draft.candidates_IK is not None else (_walked(draft, following), None)
    return StepEvent(
        kind="verify",
        step=step,
        gear=gear,
        position=length,
        rows=draft.tree.rows,
        accepted=1,
        path=path,
        tokens=tuple(following[:1]),
        confidence=draft.confidence,
        rank=rank,
        start_us=0.0,
        draft_us=0.0,
        verify_us=0.0,
        accept_us=0.0,
        host_us=0.0,
    )


def _ranked(draft: Draft, following: Sequence[int]) -> tuple[tuple[int, ...], int | None]:
    path: list[int] = []
    assert draft.candidates_IK is not None
    for token in following:
        rank = draft.rank(len(path), token)
        if rank is None or rank == draft.candidates_IK.shape[1]:
            return tuple(path), rank
        path.append(rank)
    return tuple(path), None


def _walked(draft: Draft, following: Sequence[int]) -> tuple[int, ...]:
    parents, tokens, row, path = draft.tree.parents.tolist(), draft.tokens_T.tolist(), 0, []
    for token in following:
        child = next((r for r in range(row + 1, len(parents)) if parents[r] == row and tokens[r] == token), None)
        if child is None:
            break
        path.append(int(draft.tree.ranks[child]))
        row = child
    return tuple(path)
