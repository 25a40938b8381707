"""What one text expects of every gear, and what it has gained: the part of a choice that is the text's own.

What is expected comes from `Estimate`, what a step takes from `StepTimes`; which gear is taken is chosen for all texts
that are ready for a step together (`draftwood.runtime.policy.together`), or for one that is alone.
"""

from __future__ import annotations

from typing import NamedTuple

from draftwood.manifest import Gear
from draftwood.runtime.policy.bank import Account
from draftwood.runtime.policy.estimate import Estimate
from draftwood.runtime.policy.gears import Gears
from draftwood.runtime.policy.launches import Option
from draftwood.runtime.policy.learned import Cost, Launched, Learned, Step
from draftwood.runtime.policy.outcome import Asking, Expected, Outcome
from draftwood.runtime.policy.times import StepTimes
from draftwood.runtime.policy.together import alone

# Catching up is paid for once, and thought of as spread over so many steps.
STAY = 8
_NONE = -1


class _Chosen(NamedTuple):
    """What the text takes in the step that was chosen last."""

    gear: int
    length: int
    launch: Launched
    step: Step


class Adaptive:
    """The policy of one text of at most ``max_new_tokens``, greedy or sampled, free or ``held`` to a grammar."""

    def __init__(self, gears: Gears, learned: Learned, greedy: bool, max_new_tokens: int, held: bool = False) -> None:
        self._gears, self.learned = gears, learned
        self.estimate = Estimate(learned.acceptance(greedy, held))
        self._slots, self._steps, self._match = 0, 0, 0
        # Of steps alone, and of those that others share.
        self._accounts = Account(max_new_tokens, shared=False), Account(max_new_tokens, shared=True)
        self._chosen: _Chosen | None = None

    def choose(self, length: int, late: int = 0, match: int = 0) -> Gear | None:
        asking = Asking(self, length, late, match)
        with self.learned.lock:
            options = self.options(asking, self.learned.times(1), 1)
            chosen = alone(self.learned, options, self._accounts[0]) if options else None
        self._chosen = None
        return None if chosen is None else self._gears.gears[chosen]

    def options(self, asking: Asking, times: StepTimes, texts: int) -> list[Option]:
        """What it may take in a launch of so many texts, plain decoding first."""
        if not self._steps:
            self.estimate.begin(asking.length)
        self._match, length, shapes = asking.match, asking.length, self._gears.shape
        plain, drafting = self._gears.fitting.at(length, self._slots)
        tokens, matched = self.estimate.tokens(asking.match), self._gears.forest.matched
        catch_up_us = self.learned.catch_up_us(asking.late)
        found = []
        if plain != _NONE:
            us = times.us(plain, length) / texts
            found.append(Option(plain, 1.0, us, us, plain))
        fixed_us = self.learned.fixed_us(drafting, plain, length, texts) if plain != _NONE else [0.0] * len(drafting)
        for gear, graph_us in zip(drafting, fixed_us, strict=True):
            looked_up = shapes[gear] in matched
            if looked_up and not asking.match:
                continue  # there is nothing to propose
            us, late_us = times.us(gear, length) / texts, 0.0 if looked_up else catch_up_us
            graph = None if looked_up else self._gears.gears[gear].draft
            every_us = us + late_us / STAY, us + late_us
            found.append(Option(gear, tokens[shapes[gear]], *every_us, gear, graph, graph_us if graph else 0.0))
        return found

    def late(self, gear: int, asking: Asking) -> int:
        """Tokens that a draft of the gear has to catch up with."""
        shape = self._gears.shape[gear]
        return 0 if shape == _NONE or shape in self._gears.forest.matched else asking.late

    def grows(self, gear: int) -> bool:
        """Whether the text moves to a larger KV length for the gear."""
        return 0 < self._slots < self._gears.gears[gear].slots

    def loan_us(self, plain_us: float, texts: int) -> float:
        """How much longer than a plain batch of so many texts a step may take."""
        return self._accounts[texts > 1].loan_us(plain_us)

    def takes(self, gear: int, length: int, launch: Launched, step: Step) -> None:
        """What was chosen for it."""
        self._chosen = _Chosen(gear, length, launch, step)

    def observe(self, outcome: Outcome) -> None:
        gear = self._gears.number[outcome.gear.name]
        shape = self._gears.shape[gear]
        with self.learned.lock:
            chosen = self._chosen_for(gear, outcome)
            chosen.launch.ended(outcome.total_us)
            step_us, plain_us = chosen.step.charged_us
            texts = chosen.step.texts
            self.learned.bank.stepped(outcome.gained, step_us / texts, plain_us / texts, chosen.step.tried)
            self._accounts[texts > 1].stepped(outcome.gained, step_us, plain_us)
            if shape == _NONE:
                self.estimate.idle()
            else:
                root = self._gears.root(shape, outcome.confidence, outcome.match)
                self.estimate.walked(shape, root, outcome.path, outcome.rank)
        self._chosen, self._steps = None, self._steps + 1
        self._slots = max(self._slots, outcome.gear.slots)

    def expected(self, gear: Gear, length: int) -> Expected:
        g = self._gears.number[gear.name]
        shape, chosen = self._gears.shape[g], self._chosen
        with self.learned.lock:
            own = chosen is not None and (chosen.gear, chosen.length) == (g, length)
            us = chosen.launch.us if chosen and own else self.learned.times(1).us(g, length)
            return Expected(1.0 if shape == _NONE else self.estimate.tokens(self._match)[shape], us)

    def _chosen_for(self, gear: int, outcome: Outcome) -> _Chosen:
        """What was chosen for the step that has ended; a step alone where it is another one."""
        chosen, length = self._chosen, outcome.length
        if chosen is not None and (chosen.gear, chosen.length) == (gear, length):
            return chosen
        shape, plain = self._gears.shape[gear], self._gears.fitting.at(length, self._slots).plain
        late = 0 if shape == _NONE else outcome.late
        launch, base = Launched(self.learned, [Cost(gear, length)], late, self.grows(gear)), None
        if plain not in (gear, _NONE):
            base = Launched(self.learned, [Cost(plain, length)])
            tried = shape != _NONE and self.estimate.tokens(outcome.match)[shape] * base.us < launch.us
        return _Chosen(gear, length, launch, Step(base or launch, [launch], 1, base is not None and tried))
