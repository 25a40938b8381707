"""A text's policy as the runtime asks it, and the one that does not learn."""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

from draftwood.manifest import Gear
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.policy.gears import PLAIN, Gears
from draftwood.runtime.speculation.step import Outcome


class Expected(NamedTuple):
    """Expectations of a step of the gear that was chosen: tokens, the bonus counted, and microseconds."""

    tokens: float
    us: float


@runtime_checkable
class Policy(Protocol):
    """Chooses the gear of each step of one text. Its state is that text's alone.

    Its choice follows only from the bundle's tables and from the steps that it has observed. No choice changes a token.
    """

    def choose(self, length: int, late: int = 0, match: int = 0) -> Gear | None:
        """The gear for a step after ``length`` committed tokens; None if the context is full.

        ``late`` are tokens that the drafter's caches lack, which the next draft has to write. ``match`` is the class of
        the longest end of the text that stands in it once more, for gears that look their tree up there.

        Asking twice gives the same answer: only ``observe`` changes a policy's knowledge.
        """

    def observe(self, outcome: Outcome) -> None:
        """Takes note of a finished step."""

    def expected(self) -> Expected | None:
        """Expectations of the step that was chosen; None if the policy has no opinion. For traces alone."""


class Asking(NamedTuple):
    """A text that is ready for a step: its policy, and the arguments of its choice."""

    policy: Policy
    length: int
    late: int = 0
    match: int = 0


class FixedTree:
    """Always the tree of a gear, from its KV length on, and at the smallest that holds it; plain decoding without one.

    If the tree no longer fits into the largest KV length, plain decoding goes on to the end.

    Raises:
        RequestError: no gear has that name.
    """

    def __init__(self, bundle: Bundle, gear: str | None = None) -> None:
        self._gears = Gears.of(bundle)
        self._tree, self._slots = (PLAIN, 0) if gear is None else (bundle.gear(gear).tree, bundle.gear(gear).slots)

    def choose(self, length: int, late: int = 0, match: int = 0) -> Gear | None:
        gears = [gear for gear in self._gears.with_room(length, self._slots) if gear.tree in (self._tree, PLAIN)]
        return min(gears, key=lambda gear: (gear.tree != self._tree, gear.slots), default=None)

    def observe(self, outcome: Outcome) -> None:
        pass

    def expected(self) -> Expected | None:
        return None
