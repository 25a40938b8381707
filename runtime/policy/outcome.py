"""What a policy is asked, and what it is told of every step (`draftwood.runtime.speculation.step.Outcome`)."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from draftwood.manifest import Gear
from draftwood.runtime.speculation.step import Outcome as Outcome


class Expected(NamedTuple):
    """What a policy expects of a step of the gear that it chose: tokens, the bonus counted, and microseconds."""

    tokens: float
    us: float


class Policy(Protocol):
    """Chooses the gear of each step of one text. Its state is that text's alone.

    What it chooses follows from the bundle's tables and from what it has observed, and from nothing else; and no
    choice changes a token.
    """

    def choose(self, length: int, late: int = 0, match: int = 0) -> Gear | None:
        """The gear for a step behind ``length`` committed tokens; None where the context is full.

        ``late`` are tokens that the drafter's caches are behind, which the next draft has to write. ``match`` is the
        class of the longest end of the text that stands in it once more, for gears that look their tree up there.

        Asking twice gives the same answer: only ``observe`` changes what a policy knows.
        """

    def observe(self, outcome: Outcome) -> None:
        """Takes note of a finished step."""

    def expected(self, gear: Gear, length: int) -> Expected | None:
        """What a step of the gear is expected to do; None where the policy has no opinion. For traces alone."""


class Asking(NamedTuple):
    """A text that is ready for a step: its policy, and what that is asked with."""

    policy: Policy
    length: int
    late: int = 0
    match: int = 0

    def alone(self) -> Gear:
        """The gear that its policy would choose whatever else there is."""
        gear = self.policy.choose(self.length, self.late, self.match)
        assert gear is not None, "a text that fills the context has ended"
        return gear
