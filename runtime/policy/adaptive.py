"""The gears of all texts that are ready for a step, in one launch: those of the most expected tokens a microsecond.

All texts of a launch draft with one tree, or none does. A text that cannot have the tree decodes plainly next to those
that have it. Either its KV length has no room, or it has nothing to look up. All pay for a launch with their time, so
the one that may lose least decides (`draftwood.runtime.policy.bank`).

Plain decoding shows nothing of the drafter, so by itself it would never be left again. If no draft is expected to gain,
one is tried now and then, provided that the bank has saved its cost. Nor do drafts show how long plain steps take, on
which the promise rests. If drafts gain little, a few plain steps check it now and then.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock

from draftwood.manifest import Gear
from draftwood.runtime.policy.bank import EXTRA, Account
from draftwood.runtime.policy.gains import Ease
from draftwood.runtime.policy.gears import NO_DRAFT, Gears
from draftwood.runtime.policy.policy import Asking, Expected
from draftwood.runtime.policy.times import Pace, StepTimes
from draftwood.runtime.speculation.step import Outcome

# Catching up is paid for once, and weighed as if it were spread over this many steps.
STAY = 8
# A draft that has no more tokens to catch up with, for each of its texts, tells the time of its gear.
FEW = 16
# A launch is charged with its time, up to this many times the expected one. Another guest's work, or the opening of a
# graph, is no fault of drafts.
MOST_CHARGED = 1.5
# Less than this many times plain decoding's speed may be no gain. It is checked, unless plain steps have told it of
# late.
DOUBTED = 1.4
# A ratio that is larger by less is rounding.
LARGER = 1 + 1e-9

# Texts that are ready for a step, with their policies, which share their knowledge.
Texts = Sequence[tuple["Adaptive", Asking]]


class Learned:
    """Knowledge that all texts of a bundle share; its lock is held while a policy reads or adds."""

    def __init__(self, gears: Gears) -> None:
        self.lock, self.bank, self.gears = Lock(), Account(), gears
        # Microseconds that tries have lost.
        self.tried_us = 0.0
        self._pace = Pace()
        # By texts of a launch.
        self._times = {1: StepTimes(gears.times, self._pace)}
        # Of greedy or sampled texts, free or held to a grammar, which fills drafts.
        self.gains = {(greedy, held): gears.gains(greedy) for greedy in (True, False) for held in (True, False)}

    def times(self, texts: int) -> StepTimes:
        """Times of launches that ``texts`` texts share."""
        if texts not in self._times:
            self._times[texts] = StepTimes(self.gears.times_of(texts), self._pace)
        return self._times[texts]

    def late_us(self, tokens: int, texts: int) -> float:
        """Additional microseconds of a launch with that many late tokens, which were timed for one text or guessed."""
        return self.times(1 if self.gears.times.absolute else texts).late_us(tokens)


class Launch:
    """A launch that texts may share: the gear of each, the tokens expected of it, and its time next to a plain one's.

    If rows are padded, every text takes as long as the one of the most rows.
    """

    def __init__(self, texts: Texts, gears: Sequence[Gear], padded: bool, plain: Launch | None = None) -> None:
        self._learned, self.gears, self.texts, self.plain = texts[0][0].learned, gears, len(texts), plain or self
        self._times, rows = self._learned.times(len(texts)), self._learned.gears.rows
        tallest = max(gears, key=lambda gear: rows[gear.name])
        each = [(gear, policy, text) for gear, (policy, text) in zip(gears, texts, strict=True)]
        # The gear and length by which each text's part of the time is known.
        self._costs = [(tallest if padded else gear, text.length) for gear, _, text in each]
        self._late = sum(text.late for gear, _, text in each if gear.neural)
        # A drafter's launch hardly becomes shorter if some texts decode plainly: it tells nothing of their parts.
        self._tells = self._late <= FEW * len(texts) and len({gear.neural for gear in gears}) == 1
        self.drafts = any(gear.draft for gear in gears)
        self.tokens = sum(policy.tokens(gear, text.match) for gear, policy, text in each)
        # Whether it is expected to lose.
        self.tried = False
        # The time that its texts answer for, once it has ended.
        self.took_us: float | None = None

    @property
    def us(self) -> float:
        """Expected microseconds: the mean of launches in which all texts take the gear of one of them."""
        return self._us(1)

    @property
    def rate(self) -> float:
        """Tokens a microsecond, in the long run."""
        return self.tokens / self._us(STAY)

    @property
    def plain_unknown(self) -> bool:
        """Whether plain steps of late have told too little of their time."""
        return any(self._times.aged(gear.name) for gear, _ in self._costs if not gear.draft)

    def ended(self, us: float) -> None:
        """Enters its time; the first of its texts to tell counts."""
        if self.took_us is None:
            expected_us = self.us
            for gear, length in {gear.name: (gear, length) for gear, length in self._costs}.values():
                if self._tells and bool(gear.draft) == self.drafts:
                    self._times.observe(gear.name, length, us / expected_us * self._times.us(gear.name, length))
            self.took_us = min(us, MOST_CHARGED * expected_us) if self.drafts else self.us

    def _us(self, stay: int) -> float:
        own_us = sum(self._times.us(gear.name, length) for gear, length in self._costs) / self.texts
        return own_us + self._learned.late_us(self._late, self.texts) / stay


class Adaptive:
    """The policy of one text of at most ``max_new_tokens``, greedy or sampled, free or ``held`` to a grammar."""

    def __init__(self, learned: Learned, greedy: bool, max_new_tokens: int, held: bool = False) -> None:
        self._gears, self.learned, self.account = learned.gears, learned, Account(max_new_tokens)
        self._gains, self._ease = learned.gains[greedy, held], Ease(learned.gains[greedy, held])
        self._slots, self._steps = 0, 0
        # The last choice: the gear, the text as it was, and the launch.
        self._chosen: tuple[Gear, Asking, Launch] | None = None

    def choose(self, length: int, late: int = 0, match: int = 0) -> Gear | None:
        asking = Asking(self, length, late, match)
        return choose([(self, asking)])[0] if self._gears.fitting(length, self._slots) else None

    def options(self, asking: Asking) -> dict[int, Gear]:
        """The gears that the text may take, by shape; none is looked up without a match."""
        if not self._steps:
            self._ease = Ease(self._gains, asking.length)
        fitting = self._gears.fitting(asking.length, self._slots)
        return {shape: gear for shape, gear in fitting.items() if asking.match or not gear.looks_up}

    def tokens(self, gear: Gear, match: int) -> float:
        """Expected tokens of a step of the gear, the bonus counted."""
        return self._ease.tokens(self._gears.shape[gear.name], match) if gear.draft else 1.0

    def takes(self, gear: Gear, asking: Asking, launch: Launch) -> None:
        """Takes note of the choice for it."""
        self._chosen = gear, asking, launch

    def observe(self, outcome: Outcome) -> None:
        gear = outcome.gear
        with self.learned.lock:
            if self._chosen is not None and self._chosen[0] is gear:
                self._pay(outcome, self._chosen[2])
            if gear.draft:
                self._ease.saw(self._gears.shape[gear.name], outcome.match, outcome.path)
            else:
                self._ease.idle()
        self._chosen, self._steps = None, self._steps + 1
        self._slots = max(self._slots, gear.slots)

    def expected(self) -> Expected | None:
        if self._chosen is None:
            return None
        gear, text, launch = self._chosen
        with self.learned.lock:
            return Expected(self.tokens(gear, text.match), launch.us)

    def _pay(self, outcome: Outcome, launch: Launch) -> None:
        """Enters the text's part of a launch in the accounts."""
        learned, gained, texts = self.learned, outcome.gained, launch.texts
        if outcome.texts == texts:  # or it was shared with texts of other policies, and took as long as they did
            launch.ended(outcome.total_us)
        us, plain_us = launch.us if launch.took_us is None else launch.took_us, launch.plain.us
        learned.bank.stepped(gained, us / texts, plain_us / texts)
        self.account.stepped(gained, us, plain_us)
        if launch.tried:
            learned.tried_us += max(us - gained * plain_us, 0.0) / texts


def choose(texts: Texts, padded: bool = False) -> list[Gear]:
    """The gear of every text in one launch; their policies share their knowledge.

    ``padded`` if a launch of several texts pads the rows of each to those of the largest tree.
    """
    learned = texts[0][0].learned
    with learned.lock:
        options = [policy.options(text) for policy, text in texts]
        plain = Launch(texts, [each[NO_DRAFT] for each in options], padded)
        drafting = [
            Launch(texts, [each.get(shape, each[NO_DRAFT]) for each in options], padded, plain)
            for shape in dict.fromkeys(shape for each in options for shape in each if shape != NO_DRAFT)
        ]
        launch = _best(learned, plain, drafting, [policy.account for policy, _ in texts])
        for (policy, text), gear in zip(texts, launch.gears, strict=True):
            policy.takes(gear, text, launch)
        return list(launch.gears)


def _best(learned: Learned, plain: Launch, drafting: Sequence[Launch], accounts: Sequence[Account]) -> Launch:
    """The launch of the highest rate that all accounts allow, or one that is tried though it is expected to lose."""
    texts, plain_us = plain.texts, plain.us
    loan_us = min(learned.bank.loan_us(plain_us, texts), *(account.loan_us(plain_us) for account in accounts))
    allowed = [launch for launch in drafting if launch.us <= plain_us + loan_us]
    best = max(allowed, key=lambda launch: launch.rate, default=plain)
    if best is not plain and best.rate <= plain.rate * LARGER:
        lost_us = best.us - best.tokens * plain_us / texts
        best.tried = lost_us + learned.tried_us <= EXTRA * learned.bank.plain_us
        best = best if best.tried else plain
    # It has to be seen first how long plain steps take.
    doubted = not learned.times(texts).table.absolute or best.rate < DOUBTED * plain.rate
    return plain if doubted and plain.plain_unknown else best
