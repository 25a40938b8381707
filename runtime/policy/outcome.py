"""What a policy is asked, and what it is told of every step."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from draftwood.manifest import Gear


class Outcome(NamedTuple):
    """What one decoding step did.

    Args:
        gear: that ran.
        length: committed tokens before the step.
        path: the rank path that the teacher accepted; empty if nothing was drafted.
        gained: tokens, the bonus counted.
        rank: of the bonus among the candidates at the path's end, where the drafter's list is known: one that no
            tree has if it is beyond the list. None where only the tree's own nodes are known.
        cut: whether something other than the teacher's choice may have ended the walk (an end token, a token limit,
            a grammar); such a walk tells nothing.
        draft_us, verify_us, host_us: microseconds of the step.
        confidence: probability of the drafter's best first candidate, where known.
        late: tokens that the drafter's caches were behind, beyond those of one step.
    """

    gear: Gear
    length: int
    path: tuple[int, ...]
    gained: int
    rank: int | None = None
    cut: bool = False
    draft_us: float = 0.0
    verify_us: float = 0.0
    host_us: float = 0.0
    confidence: float | None = None
    late: int = 0

    @property
    def total_us(self) -> float:
        """The whole step."""
        return self.draft_us + self.verify_us + self.host_us


class Expected(NamedTuple):
    """What a policy expects of a step of the gear that it chose: tokens, the bonus counted, and microseconds."""

    tokens: float
    us: float


class Policy(Protocol):
    """Chooses the gear of each step of one text. Its state is that text's alone.

    What it chooses follows from the bundle's tables and from what it has observed, and from nothing else; and no
    choice changes a token.
    """

    def choose(self, length: int, late: int = 0) -> Gear | None:
        """The gear for a step behind ``length`` committed tokens; None where the context is full.

        ``late`` are tokens that the drafter's caches are behind, which the next draft has to write.

        Asking twice gives the same answer: only ``observe`` changes what a policy knows.
        """

    def observe(self, outcome: Outcome) -> None:
        """Takes note of a finished step."""

    def expected(self, gear: Gear, length: int) -> Expected | None:
        """What a step of the gear is expected to do; None where the policy has no opinion. For traces alone."""
