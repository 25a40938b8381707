"""How many rows of tree steps have the bits of plain decoding, by the kind of row.

Every row of every step, accepted or not, is compared with plain decoding of its own path, one row a step. Rows are the
root; the principal chain, whose ancestors lie in the slots that plain decoding uses; others, whose ancestors do not;
and the last row of a prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftwood.manifest import Gear
from draftwood.runtime.engines import StagedEngine
from draftwood.runtime.speculation.sampling import Sampling, draw
from draftwood.runtime.speculation.step import Draft, accept
from draftwood.tools.comparison import single
from draftwood.trees import Topology, TreeBuffers, tensorize

# T tree rows, V vocabulary

KINDS = ("root", "principal", "other", "prompt")
ONE = tensorize(Topology.plain())


class Row(NamedTuple):
    """A row's kind, the position that it draws for, its logits, and those of plain decoding."""

    kind: str
    position: int
    got_V: NDArray[np.float32]
    plain_V: NDArray[np.float32]


@dataclass(kw_only=True, slots=True)
class Count:
    """Rows of a kind; how many have the bits of plain decoding, how far off others are at most, and how many of them
    draw another token."""

    rows: int = 0
    equal: int = 0
    apart: float = 0.0
    redrawn: int = 0

    def add(self, row: Row, sampling: Sampling) -> None:
        same = np.array_equal(row.got_V.view(np.int32), row.plain_V.view(np.int32))
        self.rows, self.equal = self.rows + 1, self.equal + int(same)
        if not same:
            self.apart = max(self.apart, float(np.abs(row.got_V - row.plain_V).max()))
            got, plain = (draw(logits_V, sampling, row.position) for logits_V in (row.got_V, row.plain_V))
            self.redrawn += int(got != plain)


class Plain:
    """Plain decoding of a text, by steps of one row."""

    def __init__(self, engine: StagedEngine, text: list[int], slots: int) -> None:
        self.engine, self.state = engine, engine.begin(slots)
        self.state.draft = None  # nothing is drafted from it
        engine.prefill(self.state, np.array(text, np.int64))

    def follow(self, tokens: Iterable[int]) -> NDArray[np.float32]:
        """Commits tokens; the logits behind the last."""
        for token in tokens:
            logits_V = single.verify(self.engine, self.state, np.array([token]), ONE).logits_RV[0]
            self.state.commit([0])
        return logits_V.copy()

    def rows(self, draft: Draft) -> list[NDArray[np.float32]]:
        """Logits of every row of a tree by its path alone; nothing stays committed."""
        length, tree = self.state.length, draft.tree
        found: dict[int, NDArray[np.float32]] = {}
        # A path's rows follow each other, so that what is above a row is there already.
        for row in sorted(range(tree.rows), key=lambda row: tree.paths[row, : tree.depths[row] + 1].tolist()):
            self.state.rollback(length + int(tree.depths[row]))
            found[row] = self.follow([int(draft.tokens_T[row])])
        self.state.rollback(length)
        return [found[row] for row in range(tree.rows)]


def measure(
    engine: StagedEngine, text: list[int], sampling: Sampling, gear: Gear, new: int
) -> dict[str, dict[str, Any]]:
    """Counts by the kind of row, over ``new`` tokens behind a text."""
    counts = {kind: Count() for kind in KINDS}
    for row in _rows(engine, text, sampling, gear, new):
        counts[row.kind].add(row, sampling)
    return {kind: asdict(count) for kind, count in counts.items()}


def _rows(engine: StagedEngine, text: list[int], sampling: Sampling, gear: Gear, new: int) -> Iterator[Row]:
    """The rows of every step behind a text, and the last one of a prompt that holds as much."""
    known, state, plain = [*text], engine.begin(gear.slots, sampling), Plain(engine, text, gear.slots)
    engine.start(state, np.array(text, np.int64))
    room = gear.slots - 2 * engine.bundle.manifest.dims.branch_rows
    while state.length < min(len(text) + new, room):
        draft = engine.draft([state], gear)[0]
        logits_TV = single.verify(engine, state, draft.tokens_T, draft.tree).logits_RV.copy()
        position_T = state.length + 1 + draft.tree.depths
        for row, plain_V in enumerate(plain.rows(draft)):
            yield Row(_kind(draft.tree, row), int(position_T[row]), logits_TV[row], plain_V)
        path = accept(state, draft, logits_TV)
        state.commit(path.rows, root=path.bonus)
        tokens = draft.tokens_T[list(path.rows)].tolist()
        known += tokens
        prompt_V = single.prefill(engine, engine.begin(gear.slots), np.array(known)).logits_RV[0].copy()
        yield Row("prompt", len(known), prompt_V, plain.follow(tokens))


def _kind(tree: TreeBuffers, row: int) -> str:
    """The root; a row whose ancestors lie in consecutive slots; any other."""
    return "root" if row == 0 else "principal" if tree.depths[row] == row else "other"
