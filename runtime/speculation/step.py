"""One step of tree speculative decoding: draft, verify, accept, commit (Cai et al., 2024; Li et al., 2024).

The drafter proposes a tree of tokens after the root. The teacher runs all its rows at once, each seeing its ancestors.
At every row of the walk the teacher draws one token. A child that carries it is accepted; otherwise the token is the
bonus and the next root. Plain decoding is the step whose tree is its root alone.

This is the only place where a step is written. An engine gives its parts (`Parts`); it runs graphs, knows where memory
lies, and neither opens nor commits a branch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from draftwood.errors import UserError
from draftwood.manifest import Gear
from draftwood.runtime.speculation.draft_cache import DeviceRows
from draftwood.runtime.speculation.logprobs import token_logprobs
from draftwood.runtime.speculation.lookup import LOOKED_UP
from draftwood.runtime.speculation.sampling import Logits
from draftwood.runtime.speculation.sequence import SequenceState
from draftwood.trees import Accepted, TreeBuffers, walk

# T tree rows, M = T - 1 draft nodes, R rows with logits, V vocabulary, F features


class Draft(NamedTuple):
    """A tree to verify: the token of every row, the root's first, and the tree's buffers.

    ``scores_M`` are log-probabilities of the nodes: a candidate's own if levels are ranked (Medusa, FastEagle), its
    path's if nodes are (EAGLE-3). A tree that was looked up in the text, after a match of class ``match``, has none.
    ``candidates_IK`` are those of every level, if levels are ranked.
    """

    tokens_T: NDArray[np.int64]
    scores_M: NDArray[np.float32]
    tree: TreeBuffers
    candidates_IK: NDArray[np.int64] | None = None
    match: int = 0

    @property
    def confidence(self) -> float | None:
        """Probability of the best first candidate; None of a draft that proposes nothing."""
        return float(np.exp(min(self.scores_M[0], 0.0))) if len(self.scores_M) else None

    def rank(self, depth: int, token: int) -> int | None:
        """A token's rank among the candidates after a path of ``depth`` nodes, K if it is none of them.

        None if the candidates are not known: of a drafter that ranks no levels, or past its last one.
        """
        if self.candidates_IK is None or depth >= len(self.candidates_IK):
            return None
        ranked = self.candidates_IK[depth].tolist()
        return ranked.index(token) if token in ranked else len(ranked)


class TeacherOutput(NamedTuple):
    """A teacher step's outputs for one text, as views that the next step of the same engine overwrites.

    Drafts are made from ``features``: of the rows with logits, or of all rows of a prefill step.
    """

    logits_RV: NDArray[np.float32]
    choice_R: NDArray[np.int64]
    features_RF: NDArray[np.float32]

    def copied(self) -> TeacherOutput:
        """A copy of the outputs, which the next step leaves alone."""
        return TeacherOutput(self.logits_RV.copy(), self.choice_R.copy(), self.features_RF.copy())


class Prefill(NamedTuple):
    """The result of a prefill: ``tokens`` is the first new one alone, the root; ``rows`` are the prompt's."""

    tokens: tuple[int, ...]
    rows: int
    verify_us: float = 0.0
    accept_us: float = 0.0


class Outcome(NamedTuple):
    """The work of one step for one text: the one record that the stream, the policy and the trace read.

    Args:
        gear: that ran.
        length: committed tokens before the step.
        path: the rank path that the teacher accepted, even if the text ends on it; empty if nothing was drafted. Nodes
            that were looked up besides a drafter's have rank `LOOKED_UP`.
        gained: tokens, the bonus counted.
        rank: of the bonus among the candidates at the path's end, if the drafter's list is known: one that no tree has
            if it is beyond the list. None if only the tree's own nodes are known.
        draft_us, verify_us: microseconds in the graphs; if one launch does both, they are its verify.
        host_us: microseconds outside them: acceptance, commit, and the choice of the gear.
        confidence: probability of the drafter's best first candidate, if known.
        late: tokens missing in the drafter's caches, beyond those of one step.
        tokens: those that were gained, in order; the last is the bonus, the new root.
        rows: of the tree.
        accept_us: the part of ``host_us`` that acceptance and commit took.
        texts: that shared the launch; all times are of the whole launch.
        match: class of the match after which a tree was looked up in the text.
        draft: the tree that was verified.
        invariants: of tree and caches that were checked, and held; None unless an engine for comparison ran.
    """

    gear: Gear
    length: int
    path: tuple[int, ...]
    gained: int
    rank: int | None = None
    draft_us: float = 0.0
    verify_us: float = 0.0
    host_us: float = 0.0
    confidence: float | None = None
    late: int = 0
    tokens: tuple[int, ...] = ()
    rows: int = 1
    accept_us: float = 0.0
    texts: int = 1
    match: int = 0
    draft: Draft | None = None
    invariants: int | None = None

    @property
    def total_us(self) -> float:
        """The whole step."""
        return self.draft_us + self.verify_us + self.host_us


# The logits of a tree's row, float32 [V].
LogitsOf = Callable[[int], Logits]
# The results of a verify launch that acceptance reads: outputs in the host's memory, or places on a device.
Verified = TypeVar("Verified")
# The accepted rows, and the features of the path's rows, or of its last ones.
Taken = tuple[Accepted, NDArray[np.float32] | DeviceRows | None]


class Parts(Protocol[Verified]):
    """The parts of a step. Each takes a list of texts and does them in one call, as many as the engine takes."""

    def whole(
        self, states: Sequence[SequenceState], gears: Sequence[Gear]
    ) -> tuple[list[Draft], list[Verified]] | None:
        """Drafts, verifies and accepts in one launch; None if the parts have their own launches."""

    def draft(self, states: Sequence[SequenceState], gears: Sequence[Gear]) -> list[Draft]:
        """For every text a tree of its gear after its root."""

    def verify(self, states: Sequence[SequenceState], drafts: Sequence[Draft]) -> list[Verified]:
        """Runs the trees' rows after the committed texts (R = T)."""

    def accept(
        self, states: Sequence[SequenceState], drafts: Sequence[Draft], verified: Sequence[Verified]
    ) -> list[Taken]:
        """The path that the teacher takes through every tree."""


class HostParts:
    """The parts of an engine that gives logits to the host, and launches draft and verify one by one."""

    def whole(self, states: Sequence[SequenceState], gears: Sequence[Gear]) -> None:
        return None

    def accept(
        self, states: Sequence[SequenceState], drafts: Sequence[Draft], verified: Sequence[TeacherOutput]
    ) -> list[Taken]:
        accepted_rows: list[Taken] = []
        for state, draft, output in zip(states, drafts, verified, strict=True):
            accepted = accept(state, draft, output.logits_RV.__getitem__)
            features = output.features_RF[list(accepted.rows)] if state.draft else None
            accepted_rows.append((accepted, features))
        return accepted_rows


def speculative_step(parts: Parts[Verified], states: Sequence[SequenceState], gears: Sequence[Gear]) -> list[Outcome]:
    """One step of every text, each with its own gear.

    Raises:
        NumericError: the teacher's logits are no numbers; the text cannot go on.
    """
    began = time.perf_counter_ns()
    launched = parts.whole(states, gears)
    if launched is None:
        drafts = parts.draft(states, gears)
        drafted = time.perf_counter_ns()
        verified = parts.verify(states, drafts)
    else:
        drafted, (drafts, verified) = began, launched
    ran = time.perf_counter_ns()
    for state, draft in zip(states, drafts, strict=True):
        state.branched(draft.tokens_T)
    acceptance = parts.accept(states, drafts, verified)
    for state, (accepted, features) in zip(states, acceptance, strict=True):
        state.commit(accepted.rows, accepted.bonus, features)
    took_us = (drafted - began) / 1e3, (ran - drafted) / 1e3, (time.perf_counter_ns() - ran) / 1e3
    return [
        _outcome(gear, state, draft, accepted, *took_us)._replace(texts=len(states))
        for gear, state, draft, (accepted, _) in zip(gears, states, drafts, acceptance, strict=True)
    ]


def accept(state: SequenceState, draft: Draft, logits_of: LogitsOf) -> Accepted:
    """Walks the tree by the teacher's own draws. The row at depth d decides the token at position length + d + 1.

    A place at which nothing can be drawn ends the walk: the text may end before it. If not, the next step raises.
    """

    def drawn(row: int, depth: int) -> int | None:
        try:
            return state.draw(logits_of(row), state.length + depth + 1)
        except UserError:
            if depth == 0:
                raise
            return None

    accepted = walk(draft.tree, draft.tokens_T, drawn)
    keep_logprobs(state, draft, accepted, logits_of)
    return accepted


def keep_logprobs(state: SequenceState, draft: Draft, accepted: Accepted, logits_of: LogitsOf) -> None:
    """Leaves the log-probabilities of a step's tokens in the state, if they are wanted."""
    if state.top is not None:
        gained = zip(accepted.rows, _gained(draft, accepted), strict=True)
        state.logprobs = [token_logprobs(logits_of(row), token, state.top) for row, token in gained]


def _gained(draft: Draft, accepted: Accepted) -> tuple[int, ...]:
    return (*draft.tokens_T[list(accepted.rows[1:])].tolist(), accepted.bonus)


def _outcome(
    gear: Gear,
    state: SequenceState,
    draft: Draft,
    accepted: Accepted,
    draft_us: float,
    verify_us: float,
    accept_us: float,
) -> Outcome:
    tokens = _gained(draft, accepted)
    return Outcome(
        gear=gear,
        length=state.length - len(accepted.rows),
        path=accepted.path,
        gained=len(tokens),
        # After a node that was looked up, the drafter has ranked nothing.
        rank=None if LOOKED_UP in accepted.path else draft.rank(len(accepted.path), accepted.bonus),
        draft_us=draft_us,
        verify_us=verify_us,
        host_us=accept_us,
        confidence=draft.confidence,
        tokens=tokens,
        rows=draft.tree.rows,
        accept_us=accept_us,
        match=draft.match,
        draft=draft,
    )
