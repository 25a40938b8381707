"""Each step the gear of the most expected tokens per microsecond, plain decoding always among them.

What is expected comes from `Estimate`, what a step takes from `StepTimes`, and `Bank` forbids what could break its
promise. Plain decoding shows nothing of the drafter, so it would never be left again: a gear that is expected to lose
is tried now and then, where the bank has put by what that may cost. Nor do drafts show what plain decoding takes, on
which the promise rests: where they gain little, a few plain steps check it now and then.

All that is learned is shared by the texts of a bundle (`Learned`); a text has its ease and its own account.
"""

from __future__ import annotations

from threading import Lock

from draftwood.manifest import Gear
from draftwood.runtime.policy.bank import FLOOR, SHORT, Bank
from draftwood.runtime.policy.estimate import Acceptance, Estimate
from draftwood.runtime.policy.gears import Gears
from draftwood.runtime.policy.outcome import Expected, Outcome
from draftwood.runtime.policy.times import StepTimes

# Catching up is paid for once, and thought of as spread over so many steps.
STAY = 8
# Less than so many times plain decoding's speed may be no gain: it is checked, unless plain steps have told it of late.
DOUBTED = 1.4
_NONE = -1


class Learned:
    """What the texts of a bundle have shown, whoever asks for them; its lock is held while a policy reads or adds."""

    def __init__(self, gears: Gears) -> None:
        self.lock, self.bank, self._gears = Lock(), Bank(), gears
        # By texts of a launch.
        self._times = {1: StepTimes(gears.times)}
        self.greedy, self.sampled = Acceptance(gears.greedy), Acceptance(gears.sampled)

    def times(self, texts: int) -> StepTimes:
        """Of launches that so many texts share."""
        if texts not in self._times:
            self._times[texts] = StepTimes(self._gears.times_of(texts))
        return self._times[texts]


class Adaptive:
    """The policy of one text of at most ``max_new_tokens``."""

    def __init__(self, gears: Gears, learned: Learned, greedy: bool, max_new_tokens: int) -> None:
        self._gears, self._learned, self._times = gears, learned, learned.times(1)
        self.estimate = Estimate(learned.greedy if greedy else learned.sampled)
        self._short, self._slots, self._steps = min(SHORT, max_new_tokens), 0, 0
        self._match = 0
        # Tokens so far, and what drafting has saved of their time, in microseconds.
        self._tokens, self._saved_us = 0, 0.0

    def choose(self, length: int, late: int = 0, match: int = 0) -> Gear | None:
        with self._learned.lock:
            self._match = match
            gear = self._chosen(length, late)
        return None if gear == _NONE else self._gears.gears[gear]

    def observe(self, outcome: Outcome) -> None:
        gear, length = self._gears.number[outcome.gear.name], outcome.length
        with self._learned.lock:
            self._times = self._learned.times(outcome.texts)  # the next launch will have about as many texts
            plain = self._gears.fitting.at(length, self._slots).plain
            if self._gears.shape[gear] == _NONE:
                self._times.observe(gear, length, outcome.total_us)
                self._learned.bank.decoded(self._times.us(gear, length))
                self.estimate.idle()
            else:
                self._drafted(gear, plain, outcome)
        self._tokens += outcome.gained
        self._steps += 1
        self._slots = max(self._slots, outcome.gear.slots)

    def expected(self, gear: Gear, length: int) -> Expected:
        g = self._gears.number[gear.name]
        shape = self._gears.shape[g]
        with self._learned.lock:
            return Expected(
                1.0 if shape == _NONE else self.estimate.tokens(self._match)[shape], self._times.us(g, length)
            )

    def _chosen(self, length: int, late: int) -> int:
        plain, drafting = self._gears.fitting.at(length, self._slots)
        if not drafting:
            return plain
        if not self._steps:
            self.estimate.begin(length)
        tokens, shape, matched = self.estimate.tokens(self._match), self._gears.shape, self._gears.forest.matched
        catch_up_us = self._times.catch_up_us(late)
        plain_us = self._times.us(plain, length) if plain != _NONE else 0.0
        best, best_speed, best_late_us = _NONE, 0.0, 0.0
        for gear in drafting:
            us, looked_up = self._times.us(gear, length), shape[gear] in matched
            if looked_up and not self._match:
                continue  # there is nothing to propose
            late_us = 0.0 if looked_up else catch_up_us
            speed = tokens[shape[gear]] / (us + late_us / STAY)
            if speed > best_speed and (plain == _NONE or self._may_lose(us + late_us - plain_us, plain_us)):
                best, best_speed, best_late_us = gear, speed, late_us
        if best == _NONE or plain == _NONE:
            return plain if best == _NONE else best
        gain = best_speed * plain_us
        if self._times.aged(plain) and (gain < DOUBTED or not self._times.table.absolute):
            return plain
        if gain >= 1:
            return best
        lost_us = self._times.us(best, length) + best_late_us - tokens[shape[best]] * plain_us
        return best if self._learned.bank.may_try(lost_us) else plain

    def _may_lose(self, lost_us: float, plain_us: float) -> bool:
        """Whether the promises would hold, for all texts and for this one, if a step gained one token alone."""
        bound_us = (1 / FLOOR - 1) * max(self._tokens + 1, self._short) * plain_us
        return lost_us <= self._saved_us + bound_us and self._learned.bank.may_lose(lost_us, plain_us)

    def _drafted(self, gear: int, plain: int, outcome: Outcome) -> None:
        gears, times, length, us = self._gears, self._times, outcome.length, outcome.total_us
        shape = gears.shape[gear]
        expected_us = times.us(gear, length)
        if plain != _NONE:
            plain_us = times.us(plain, length)
            tried = self.estimate.tokens(outcome.match)[shape] * plain_us < expected_us
        # What a late draft takes more is no time of the gear, which would be given up for its first step.
        if outcome.late and us > expected_us:
            times.caught_up(gear, outcome.late, us - expected_us)
        elif outcome.gear.slots <= self._slots or not self._slots:  # growing is no part of a step
            times.observe(gear, length, us)
        if plain != _NONE:
            # What a step took beyond what such steps take is the machine's doing.
            step_us = times.us(gear, length) + times.catch_up_us(outcome.late)
            self._learned.bank.drafted(outcome.gained, step_us, plain_us, tried)
            self._saved_us += outcome.gained * plain_us - step_us
        if not outcome.cut:
            self.estimate.walked(
                shape, gears.root(shape, outcome.confidence, outcome.match), outcome.path, outcome.rank
            )
