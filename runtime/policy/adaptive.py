"""Each step the gear of the most expected tokens per microsecond, plain decoding always among them.

What is expected comes from `Estimate`, what a step takes from `StepTimes`, and `Bank` forbids what could break its
promise. Plain decoding shows nothing of the drafter, so it would never be left again: while a text is decoded plainly,
a gear is tried every so many steps, as many as keep the price of trying at `TRY` of plain decoding. Nor do drafts show
what plain decoding takes, on which the promise rests: where they gain little, a few plain steps check it now and then.
"""

from __future__ import annotations

from draftwood.manifest import Gear
from draftwood.runtime.policy.bank import HOPED, Bank, credit
from draftwood.runtime.policy.estimate import Estimate
from draftwood.runtime.policy.fitting import Fit
from draftwood.runtime.policy.gears import Gears
from draftwood.runtime.policy.outcome import Expected, Outcome
from draftwood.runtime.policy.prior import Tables
from draftwood.runtime.policy.times import BELIEVED, Paces, StepTimes

# A gear must promise so much more than the present one, which must have run for so many steps.
MARGIN = 0.04
DWELL = 3
# Share of plain decoding's time that may go into trying whether drafting pays again; and the longest wait.
TRY = 0.02
LONGEST_WAIT = 400
# Catching up is paid for once, and thought of as spread over so many steps.
STAY = 8
# A step may take so much longer than expected before the account notices: what comes on top is a hiccup.
HICCUP = 3.0
# What the bank takes a step to cost, over what is expected.
UPPER = 1.15
# Plain steps that anchor the price of a token where no table tells it.
ANCHOR = 2
# Less than so many times plain decoding's speed may be no gain: it is checked, unless plain steps have told it of late.
DOUBTED = 1.4
_NONE = -1


class Adaptive:
    """The state of one text of at most ``max_new_tokens``; ``gears`` and ``tables`` are shared and immutable.

    ``paces`` are shared, too, and tell a text what the machine made of its table in those before.
    """

    def __init__(self, gears: Gears, tables: Tables, max_new_tokens: int, paces: Paces | None = None) -> None:
        self._gears = gears
        self.estimate, self.times = Estimate(tables), StepTimes(gears.times, paces)
        # Lent by the first choice, which shows how long the prompt is.
        self.bank = Bank(0.0)
        self._slots, self._tokens = 0, max_new_tokens
        # The gear that ran last, how many steps it has run, and the plain steps since the last draft.
        self._last, self._dwell, self._idle = _NONE, 0, 0
        # Plain steps until a gear is tried; whether the last step was worth more, in plain steps, than it took.
        self._wait, self._paid = 0, False
        # Plain steps of a check that are still to be taken.
        self._check = 0
        # What the present spell of drafting has won, and how many spells in a row have lost.
        self._won_us, self._lost = 0.0, 0

    def choose(self, length: int, late: int = 0) -> Gear | None:
        fit = self._gears.fitting.at(length, self._slots)
        if not fit.drafting:
            return self._gears.gears[fit.plain] if fit.plain != _NONE else None
        if self._last == _NONE:
            self.estimate.begin(length)
            self.bank.credit = self._credit(length, late, fit)
        if fit.plain != _NONE and (self._check or self._stays_plain(fit.plain)):
            return self._gears.gears[fit.plain]
        return self._gears.gears[self._fastest(length, late, fit.plain, fit.drafting)]

    def observe(self, outcome: Outcome) -> None:
        gear = self._gears.number[outcome.gear.name]
        if self._gears.shape[gear] != _NONE:
            self._drafted(gear, outcome)
        elif self._check:
            self._check -= 1
            self._plainly(gear, outcome)
        else:
            self._decoded(gear, outcome)
        self._slots = max(self._slots, outcome.gear.slots)

    def expected(self, gear: Gear, length: int) -> Expected:
        g = self._gears.number[gear.name]
        shape = self._gears.shape[g]
        return Expected(1.0 if shape == _NONE else self.estimate.tokens()[shape], self.times.us(g, length))

    @property
    def wait(self) -> int:
        """Plain steps from the last draft to the next try."""
        return self._wait

    def _stays_plain(self, plain: int) -> bool:
        if not self.times.table.absolute and self.times.seen(plain) < ANCHOR and self._last in (_NONE, plain):
            return True
        return self._last != _NONE and self._gears.shape[self._last] == _NONE and self._idle < self._wait

    def _credit(self, length: int, late: int, fit: Fit) -> float:
        """What the text is lent: by the tokens that it can have, by what its gears are expected to gain, and for the
        prompt that the drafter is late by."""
        room = min(self._tokens, self._gears.fitting.room(length))
        if not self.times.table.absolute or fit.plain == _NONE:
            return credit(room, HOPED)
        tokens, shape, plain_us = self.estimate.tokens(), self._gears.shape, self.times.us(fit.plain, length)
        hope = max(tokens[shape[gear]] * plain_us / self.times.us(gear, length) for gear in fit.drafting)
        return credit(room, hope, self.times.catch_up_us(late) / plain_us)

    def _fastest(self, length: int, late: int, plain: int, drafting: tuple[int, ...]) -> int:
        """The best gear that the bank allows, or the present one where no other is better by the margin."""
        tokens, shape = self.estimate.tokens(), self._gears.shape
        plain_us = self.times.us(plain, length) if plain != _NONE else 0.0
        late_us = self.times.catch_up_us(late)
        best, best_speed, kept_speed = _NONE, 0.0, 0.0
        for gear in drafting:
            us = self.times.us(gear, length)
            if plain != _NONE and not self.bank.allows(UPPER * us + late_us, plain_us):
                continue
            speed = tokens[shape[gear]] / (us + late_us / STAY)
            if speed > best_speed:
                best, best_speed = gear, speed
            if gear == self._last:
                kept_speed = speed
        if best == _NONE:
            return plain
        if kept_speed and (self._dwell < DWELL or best_speed <= (1 + MARGIN) * kept_speed):
            best, best_speed = self._last, kept_speed
        # Who comes from plain decoding is here to try, and what has just paid for itself is tried again.
        trial = self._paid or (self._last != _NONE and shape[self._last] == _NONE)
        gain = best_speed * plain_us
        if plain == _NONE or (gain < 1 and trial):
            return best
        return plain if gain < 1 or self._doubts(gain, plain) else best

    def _doubts(self, gain: float, plain: int) -> bool:
        """Whether it is seen first, by a few steps, what plain decoding takes now."""
        if gain < DOUBTED and self.times.aged(plain):
            self._check = BELIEVED
        return self._check > 0

    def _decoded(self, gear: int, outcome: Outcome) -> None:
        if self._last == _NONE or self._gears.shape[self._last] != _NONE:
            self._lost = self._lost + 1 if self._won_us < 0 else 0
            self._wait = self._price(gear, outcome.length, outcome.late)
            self._won_us = 0.0
        self._plainly(gear, outcome)
        self._idle += outcome.gained
        self._ran(gear)

    def _plainly(self, gear: int, outcome: Outcome) -> None:
        """A plain step's part of the accounts; a text that checks stands for the rest where it stood."""
        self.times.observe(gear, outcome.length, outcome.total_us)
        self.bank.decoded(self.times.us(gear, outcome.length))
        self.estimate.idle()

    def _ran(self, gear: int) -> None:
        self._dwell = self._dwell + 1 if gear == self._last else 1
        self._last = gear

    def _price(self, plain: int, length: int, late: int) -> int:
        """Steps until a try: what it is expected to lose is then `TRY` of what was decoded meanwhile.

        An expectation that has been wrong counts for less each time, down to a try that gains nothing.
        """
        _, drafting = self._gears.fitting.at(length, self._slots)
        if not drafting:
            return 0
        tokens, shape = self.estimate.tokens(), self._gears.shape
        gear = max(drafting, key=lambda g: tokens[shape[g]] / self.times.us(g, length))
        plain_us = self.times.us(plain, length)
        if not self.times.table.absolute and self.times.seen(gear) < ANCHOR:  # what it takes is not known yet
            return DWELL
        step_us = self.times.us(gear, length) + self.times.catch_up_us(late)
        paid_us = max(TRY * plain_us - self.times.catch_up_us(1), TRY / 2 * plain_us)
        expected, most = ((step_us - gained * plain_us) / paid_us for gained in (tokens[shape[gear]], 1.0))
        steps = min(max(expected, DWELL) * 2**self._lost, most)
        return min(max(int(steps), DWELL), LONGEST_WAIT)

    def _drafted(self, gear: int, outcome: Outcome) -> None:
        gears, times, length, us = self._gears, self.times, outcome.length, outcome.total_us
        plain = gears.fitting.at(length, self._slots).plain
        expected_us, seen = times.us(gear, length), times.seen(gear)
        # What a late draft takes more is no time of the gear, which would be given up for its first step.
        if outcome.late and us > expected_us and (seen or times.table.absolute):
            times.caught_up(gear, outcome.late, us - expected_us)
        elif outcome.gear.slots <= self._slots or not self._slots:  # growing is no part of a step
            times.observe(gear, length, us)
        if plain != _NONE:
            plain_us = times.us(plain, length)
            # The first step of a gear may have opened its graphs.
            allowed_us = (HICCUP if seen else UPPER) * expected_us + times.catch_up_us(outcome.late)
            self.bank.drafted(outcome.gained, min(us, allowed_us), plain_us)
            self._paid = outcome.gained * plain_us > us
            self._won_us += outcome.gained * plain_us - us
        self._idle = 0
        if not outcome.cut:
            shape = gears.shape[gear]
            self.estimate.walked(shape, gears.root(shape, outcome.confidence), outcome.path, outcome.rank)
        self._ran(gear)
