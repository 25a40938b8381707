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
from draftwood.runtime.policy.bank import CREDIT, EXTRA, TEXT_EXTRA, TOKENS_A_CREDIT, Account
from draftwood.runtime.policy.gains import Ease, Gains
from draftwood.runtime.policy.gears import PLAIN, Gears
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
        self.lock, self.bank, self.gears = Lock(), Account(EXTRA, CREDIT), gears
        # Microseconds that tries have lost.
        self.tried_us = 0.0
        # Of greedy or sampled texts, free or held to a grammar, which fills drafts.
        self.gains = {
            (greedy, held): Gains(gears.trees, gears.planning.prior(greedy) if gears.planning else None, greedy)
            for greedy in (True, False)
            for held in (True, False)
        }
        # By texts of a launch.
        self._pace, self._times = Pace(), dict[int, StepTimes]()

    def times(self, texts: int) -> StepTimes:
        """Times of launches that ``texts`` texts share."""
        if texts not in self._times:
            self._times[texts] = StepTimes(self.gears.rows, self.gears.times, texts, self._pace)
        return self._times[texts]


class Launch:
    """A launch that texts may share: the gear of each, the tokens expected of it, and its time next to a plain one's.

    If rows are padded, every text takes as long as the one of the most rows.
    """

    def __init__(self, texts: Texts, gears: Sequence[Gear], padded: bool, plain: Launch | None = None) -> None:
        learned = texts[0][0].learned
        self.gears, self.texts, self.plain, self.drafts = gears, len(texts), plain or self, plain is not None
        self._times, alone = learned.times(len(texts)), learned.times(1)
        # Late tokens were timed for one text, or are guessed.
        self._late_times = alone if alone.absolute else self._times
        tallest = max(gears, key=lambda gear: learned.gears.rows[gear.name])
        each = [(gear, policy, text) for gear, (policy, text) in zip(gears, texts, strict=True)]
        # The gear and length by which each text's part of the time is known.
        costs = [(tallest if padded else gear, text.length) for gear, _, text in each]
        self._costs = [(gear.name, length) for gear, length in costs]
        neural = [gear.name in learned.gears.neural for gear in gears]
        self._late = sum(text.late for drafts, (_, text) in zip(neural, texts, strict=True) if drafts)
        # Gears whose times its time tells. A drafter's launch hardly becomes shorter if some texts decode plainly: it
        # tells nothing of their parts.
        tells = self._late <= FEW * len(texts) and len(set(neural)) == 1
        self._told = {gear.name: length for gear, length in costs if tells and bool(gear.draft) == self.drafts}
        self.tokens = sum(policy.ease.tokens(gear.tree, text.match) if gear.draft else 1 for gear, policy, text in each)
        self._weigh()
        # Whether it is expected to lose.
        self.tried = False
        # The time that its texts answer for, once it has ended.
        self.took_us: float | None = None

    def _weigh(self) -> None:
        """Expects a time, by what is known now."""
        steps_us, late_us = self._times.mean_us(self._costs), self._late_times.late_us(self._late)
        # Expected microseconds.
        self.us = steps_us + late_us
        # Tokens a microsecond, in the long run.
        self.rate = self.tokens / (steps_us + late_us / STAY)

    @property
    def plain_unknown(self) -> bool:
        """Whether plain steps of late have told too little of their time, of a launch that does not draft."""
        return any(self._times.aged(gear) for gear, _ in self._costs)

    def ended(self, us: float) -> None:
        """Enters its time; the first of its texts to tell counts."""
        if self.took_us is None:
            self._weigh()
            self.took_us = min(us, MOST_CHARGED * self.us) if self.drafts else self.us
            self._times.observe_launch(self._told, us / self.us)


class Adaptive:
    """The policy of one text of at most ``max_new_tokens``, greedy or sampled, free or ``held`` to a grammar."""

    def __init__(self, learned: Learned, greedy: bool, max_new_tokens: int, held: bool = False) -> None:
        self.learned, self._gains = learned, learned.gains[greedy, held]
        self.account = Account(TEXT_EXTRA, min(CREDIT, max_new_tokens / TOKENS_A_CREDIT))
        self.ease = Ease(self._gains)
        # The KV length that the text has grown to, 0 before its first step.
        self._slots = 0
        # The last choice: the gear, the text as it was, and the launch.
        self.chosen: tuple[Gear, Asking, Launch] | None = None

    def choose(self, length: int, late: int = 0, match: int = 0) -> Gear | None:
        asking = Asking(self, length, late, match)
        return choose([(self, asking)])[0] if self.learned.gears.fitting(length, self._slots) else None

    def options(self, asking: Asking) -> dict[str, Gear]:
        """The gears that the text may take, by tree; none is looked up without a match."""
        if not self._slots:
            self.ease = Ease(self._gains, asking.length)
        gears = self.learned.gears
        fitting = gears.fitting(asking.length, self._slots)
        return {tree: gear for tree, gear in fitting.items() if asking.match or not gears.trees[tree].looked_up}

    def observe(self, outcome: Outcome) -> None:
        gear = outcome.gear
        with self.learned.lock:
            if self.chosen is not None and self.chosen[0] is gear:
                self._pay(outcome, self.chosen[2])
            self.ease.saw(gear.tree, outcome.match, outcome.path)
        self.chosen, self._slots = None, max(self._slots, gear.slots)

    def expected(self) -> Expected | None:
        if self.chosen is None:
            return None
        gear, text, launch = self.chosen
        with self.learned.lock:
            return Expected(self.ease.tokens(gear.tree, text.match), launch.us)

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
    """The gear of every text in one launch, whose rows may be ``padded``; their policies share their knowledge."""
    learned = texts[0][0].learned
    with learned.lock:
        options = [policy.options(text) for policy, text in texts]
        plain = Launch(texts, [each[PLAIN] for each in options], padded)
        drafting = [
            Launch(texts, [each.get(tree, each[PLAIN]) for each in options], padded, plain)
            for tree in dict.fromkeys(tree for each in options for tree in each if tree != PLAIN)
        ]
        launch = _best(learned, plain, drafting, [policy.account for policy, _ in texts])
        for (policy, text), gear in zip(texts, launch.gears, strict=True):
            policy.chosen = gear, text, launch
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
    doubted = not learned.times(texts).absolute or best.rate < DOUBTED * plain.rate
    return plain if doubted and plain.plain_unknown else best
