"""What one text expects of every gear, and what it has gained: the part of a choice that is the text's own.

What a step gains comes from `Ease`, what it takes from `StepTimes`; which gear is taken is chosen for all texts that
are ready for a step together (`draftwood.runtime.policy.together`).
"""

from __future__ import annotations

from draftwood.manifest import Gear
from draftwood.runtime.policy.bank import Account
from draftwood.runtime.policy.gains import Ease
from draftwood.runtime.policy.gears import Gears
from draftwood.runtime.policy.learned import Cost, Learned, Step
from draftwood.runtime.policy.outcome import Asking, Expected, Outcome
from draftwood.runtime.policy.times import StepTimes
from draftwood.runtime.policy.together import Option, choose

# Catching up is paid for once, and thought of as spread over so many steps.
STAY = 8
_NONE = -1


class Adaptive:
    """The policy of one text of at most ``max_new_tokens``, greedy or sampled, free or ``held`` to a grammar."""

    def __init__(self, gears: Gears, learned: Learned, greedy: bool, max_new_tokens: int, held: bool = False) -> None:
        self._gears, self.learned = gears, learned
        self.ease = Ease(learned.gains(greedy, held))
        self._slots, self._steps, self._match = 0, 0, 0
        # Of steps alone, and of those that others share.
        self._accounts = Account(max_new_tokens, shared=False), Account(max_new_tokens, shared=True)
        # What was chosen last: the gear, the text's length, and the step.
        self._chosen: tuple[int, int, Step] | None = None

    def choose(self, length: int, late: int = 0, match: int = 0) -> Gear | None:
        fit = self._gears.fitting.at(length, self._slots)
        if fit.plain == _NONE and not fit.drafting:
            return None
        chosen = choose([Asking(self, length, late, match)], [self])[0]
        self._chosen = None
        return chosen

    def options(self, asking: Asking, times: StepTimes, texts: int) -> list[Option]:
        """What it may take in a launch of so many texts, plain decoding first."""
        if not self._steps:
            self.ease.begin(asking.length)
        self._match, length = asking.match, asking.length
        plain, drafting = self._gears.fitting.at(length, self._slots)
        found, catch_up_us = list[Option](), self.learned.catch_up_us(asking.late)
        if plain != _NONE:
            us = times.us(plain, length) / texts
            found.append(Option(plain, 1.0, us, us, plain))
        for gear in drafting:
            looked_up = self._gears.looks_up(gear)
            if looked_up and not asking.match and found:
                continue  # there is nothing to propose
            us, late_us = times.us(gear, length) / texts, 0.0 if looked_up else catch_up_us
            tokens = self.ease.tokens(self._gears.shape[gear], asking.match)
            graph = None if looked_up else self._gears.gears[gear].draft
            fixed_us = self._fixed_us(gear, plain, length, texts) if graph and texts > 1 and plain != _NONE else 0.0
            found.append(Option(gear, tokens, us + late_us / STAY, us + late_us, gear, graph, fixed_us))
        return found

    def late(self, gear: int, asking: Asking) -> int:
        """Tokens that a draft of the gear has to catch up with."""
        return asking.late if self.learned.drafts(gear) and not self._gears.looks_up(gear) else 0

    def grows(self, gear: int) -> bool:
        """Whether the text moves to a larger KV length for the gear."""
        return 0 < self._slots < self._gears.gears[gear].slots

    def loan_us(self, plain_us: float, texts: int) -> float:
        """How much longer than a plain batch of so many texts a step may take."""
        return self._accounts[texts > 1].loan_us(plain_us)

    def takes(self, gear: int, length: int, step: Step) -> None:
        """What was chosen for it."""
        self._chosen = gear, length, step

    def observe(self, outcome: Outcome) -> None:
        gear = self._gears.number[outcome.gear.name]
        with self.learned.lock:
            step = self._step(gear, outcome)
            step.ended(outcome.total_us)
            step_us, plain_us, texts = step.charged_us, step.plain_us, step.texts
            self.learned.bank.stepped(outcome.gained, step_us / texts, plain_us / texts, step.tried)
            self._accounts[texts > 1].stepped(outcome.gained, step_us, plain_us)
            if self.learned.drafts(gear):
                self.ease.saw(self._gears.shape[gear], outcome.match, outcome.path)
            else:
                self.ease.idle()
        self._chosen, self._steps = None, self._steps + 1
        self._slots = max(self._slots, outcome.gear.slots)

    def expected(self, gear: Gear, length: int) -> Expected:
        number = self._gears.number[gear.name]
        with self.learned.lock:
            us = self.learned.times(1).us(number, length)
            if self._chosen is not None and self._chosen[:2] == (number, length):
                us = self._chosen[2].us
            drafts = self.learned.drafts(number)
            return Expected(self.ease.tokens(self._gears.shape[number], self._match) if drafts else 1.0, us)

    def _fixed_us(self, gear: int, plain: int, length: int, texts: int) -> float:
        """What the gear's draft takes for however few texts; nothing that counts where nothing is timed."""
        alone = self.learned.times(1)
        if not alone.table.absolute:
            return 0.0
        return self.learned.fixed[texts].share * max(alone.us(gear, length) - alone.us(plain, length), 0.0)

    def _step(self, gear: int, outcome: Outcome) -> Step:
        """The step that was chosen; one of this text alone where another one has ended."""
        chosen, length = self._chosen, outcome.length
        if chosen is not None and chosen[:2] == (gear, length):
            return chosen[2]
        drafts, plain = self.learned.drafts(gear), self._gears.fitting.at(length, self._slots).plain
        cost, base = Cost(gear, length), Cost(gear if plain == _NONE else plain, length)
        step = Step(self.learned, [cost], [base], outcome.late if drafts else 0, grows=self.grows(gear))
        tokens = self.ease.tokens(self._gears.shape[gear], outcome.match) if drafts else 1.0
        step.tried = drafts and tokens * step.plain_us < step.us
        return step
