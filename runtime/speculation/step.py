"""One step of tree speculative decoding: draft, verify, accept, commit (Cai et al., 2024; Li et al., 2024).

The drafter proposes a tree of tokens behind the root; the teacher runs all its rows at once, each seeing its
ancestors; at every row of the walk the teacher draws one token, and a child that carries it is accepted, otherwise
the token is the bonus and the next root. Plain decoding is the step whose tree is its root alone.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from draftwood.manifest import Gear
from draftwood.runtime.speculation.sampling import draw
from draftwood.runtime.speculation.sequence import SequenceState
from draftwood.trees import Accepted, TreeBuffers, walk

# B sequences, T tree rows, M = T - 1 draft nodes, R rows with logits, V vocabulary, F features


class Draft(NamedTuple):
    """A tree to verify: the token of every row, the root's first, and the tree's buffers.

    ``scores_M`` are log-probabilities of the nodes: a candidate's own where levels are ranked (Medusa, FastEagle),
    its path's where nodes are (EAGLE-3). ``candidates_IK`` are those of every level, where levels are ranked.
    """

    tokens_T: NDArray[np.int64]
    scores_M: NDArray[np.float32]
    tree: TreeBuffers
    candidates_IK: NDArray[np.int64] | None = None

    @property
    def confidence(self) -> float | None:
        """Probability of the best first candidate; None of a draft that proposes nothing."""
        return float(np.exp(min(self.scores_M[0], 0.0))) if len(self.scores_M) else None

    def rank(self, depth: int, token: int) -> int | None:
        """A token's rank among the candidates behind a path of ``depth`` nodes, K if it is none of them.

        None where the candidates are not known: of a drafter that ranks no levels, or past its last one.
        """
        if self.candidates_IK is None or depth >= len(self.candidates_IK):
            return None
        ranked = self.candidates_IK[depth].tolist()
        return ranked.index(token) if token in ranked else len(ranked)


class TeacherOutput(NamedTuple):
    """A teacher step's outputs, as views that the next step of the same engine overwrites.

    ``features`` are what drafts are made from: of the rows with logits, or of all rows of a prefill step.
    """

    logits_BRV: NDArray[np.float32]
    choice_BR: NDArray[np.int64]
    features_BRF: NDArray[np.float32]


class StepTimes(NamedTuple):
    """Microseconds that a step spent in its parts; where one launch does them all, they are its verify."""

    draft_us: float = 0.0
    verify_us: float = 0.0
    accept_us: float = 0.0


class StepOutcome(NamedTuple):
    """What one step did for one sequence.

    ``tokens`` were gained: the accepted ones and the bonus, which is the new root. ``path`` is the rank path that
    was accepted, empty if none was. ``confidence`` is the drafter's probability of its best first candidate, None
    where nothing was drafted. ``rank`` is the bonus's among the candidates at the path's end (see ``Draft.rank``).
    """

    tokens: tuple[int, ...]
    path: tuple[int, ...]
    rows: int
    confidence: float | None
    times: StepTimes
    rank: int | None = None


class Stages(Protocol):
    """An engine that has the parts of a step one by one."""

    def draft(self, states: Sequence[SequenceState], gear: Gear) -> list[Draft]:
        """For every sequence a tree of the gear behind its root."""

    def verify(self, states: Sequence[SequenceState], drafts: Sequence[Draft]) -> TeacherOutput:
        """Runs the trees' rows behind the committed texts (R = T); the branches are left open."""


def speculative_step(engine: Stages, states: Sequence[SequenceState], gear: Gear) -> list[StepOutcome]:
    """One step of B sequences with one gear; every part is one call, whatever B is."""
    began = time.perf_counter_ns()
    drafts = engine.draft(states, gear)
    drafted = time.perf_counter_ns()
    output = engine.verify(states, drafts)
    verified = time.perf_counter_ns()
    accepted = [
        accept(state, draft, logits_TV)
        for state, draft, logits_TV in zip(states, drafts, output.logits_BRV, strict=True)
    ]
    for state, one in zip(states, accepted, strict=True):
        state.commit(one.rows, root=one.bonus)
    done = time.perf_counter_ns()
    times = StepTimes((drafted - began) / 1e3, (verified - drafted) / 1e3, (done - verified) / 1e3)
    return [outcome(draft, one, times) for draft, one in zip(drafts, accepted, strict=True)]


def accept(state: SequenceState, draft: Draft, logits_TV: NDArray[np.float32]) -> Accepted:
    """Walks the tree by the teacher's own draws; the row at depth d decides the token at position length + d + 1."""

    def drawn(row: int, depth: int) -> int:
        return draw(logits_TV[row], state.sampling, state.length + depth + 1)

    return walk(draft.tree, draft.tokens_T, drawn)


def outcome(draft: Draft, accepted: Accepted, times: StepTimes) -> StepOutcome:
    """What a step did that verified a draft."""
    tokens = (*draft.tokens_T[list(accepted.rows[1:])].tolist(), accepted.bonus)
    rank = draft.rank(len(accepted.path), accepted.bonus)
    return StepOutcome(tokens, accepted.path, draft.tree.rows, draft.confidence, times, rank)
