"""Common to reference engines: every step is held to the invariants of its tree and of its caches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from draftwood.errors import InvariantError
from draftwood.manifest import Gear
from draftwood.runtime.engines.engine import Engine
from draftwood.runtime.speculation.sequence import SequenceState
from draftwood.runtime.speculation.step import Draft, Outcome, Parts, Taken
from draftwood.trees import violations
from draftwood.trees.invariants import NAMES

# Besides those of a tree, those that the caches of a text check before a step and after it.
LOOKED_AT = len(NAMES) + 2


def hold(states: Sequence[SequenceState], drafts: Sequence[Draft]) -> None:
    """InvariantError by the name of the first invariant that a drafted tree or a text's caches break."""
    for state, draft in zip(states, drafts, strict=True):
        for violation in violations(draft.tree):
            raise InvariantError(f"tree: {violation.name} at row {violation.row}: {violation.message}")
        state.check()


class HeldParts:
    """An engine's parts of a step; a draft is held to its invariants before anything is accepted of it."""

    def __init__(self, parts: Parts[Any]) -> None:
        self._parts = parts

    def whole(self, states: Sequence[SequenceState], gears: Sequence[Gear]) -> tuple[list[Draft], list[Any]] | None:
        launched = self._parts.whole(states, gears)
        if launched is not None:
            hold(states, launched[0])
        return launched

    def draft(self, states: Sequence[SequenceState], gears: Sequence[Gear]) -> list[Draft]:
        return self._parts.draft(states, gears)

    def verify(self, states: Sequence[SequenceState], drafts: Sequence[Draft]) -> list[Any]:
        hold(states, drafts)
        return self._parts.verify(states, drafts)

    def accept(self, states: Sequence[SequenceState], drafts: Sequence[Draft], verified: Sequence[Any]) -> list[Taken]:
        return self._parts.accept(states, drafts, verified)


class Held(Engine):
    """A reference engine; it says in every step's record how many invariants held."""

    @property
    def parts(self) -> Parts[Any]:
        return HeldParts(super().parts)

    def step(self, states: Sequence[SequenceState], gears: Sequence[Gear]) -> list[Outcome]:
        outcomes = super().step(states, gears)
        for state in states:
            state.check()
        return [outcome._replace(invariants=LOOKED_AT) for outcome in outcomes]
