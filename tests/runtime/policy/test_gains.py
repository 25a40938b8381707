"""The estimator against texts of a known truth, and the mistakes that must show."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from draftwood.planned import Prior
from draftwood.runtime.policy import gains as module
from draftwood.runtime.policy.gains import HOPE, Drafted, Ease, Gains
from draftwood.trees import Topology

from .samples import drafted, draw, inside, truth

TREES = (Topology.chain(1), Topology.full([2, 1]), Topology.backbone(3, 2), Topology.chain(4))
TRUTHS = {
    "good": ([0.8, 0.1],) * 4,
    "bad": ([0.2, 0.1],) * 4,
    "first-level-bad": ([0.5, 0.05], *([0.95, 0.02],) * 3),
    "second-rank": ([0.3, 0.5], [0.4, 0.4], [0.3, 0.2], [0.1, 0.1]),
}
Choice = Callable[[np.random.Generator, int], int]


def ease_of(*trees: Topology, greedy: bool = True) -> Ease:
    """The first text of a bundle without counts."""
    return Ease(Gains(numbered(trees), None, greedy))


def numbered(trees: Sequence[Topology]) -> dict[str, Drafted]:
    return {str(number): drafted(tree, str(number)) for number, tree in enumerate(trees)}


def every(ease: Ease) -> list[float]:
    """The expected tokens of every tree."""
    return [ease.tokens(str(number)) for number in range(len(TREES))]


CHOICES: dict[str, Choice] = {
    "random": lambda random, step: int(random.integers(len(TREES))),
    "mostly-small": lambda random, step: 0 if random.random() < 0.7 else 2 + int(random.integers(2)),
}


# The trees all of whose nodes are asked for sooner or later.
ASKED = {CHOICES["random"]: [0, 1, 2, 3], CHOICES["mostly-small"]: [0, 2, 3]}


def learned(
    levels: list[list[float]],
    choice: Choice = CHOICES["random"],
    seed: int = 0,
    steps: int = 4000,
    told: Callable[[Ease, int, tuple[int, ...], tuple[int, ...]], None] | None = None,
) -> np.ndarray:
    """Mean estimate of every tree over the last two thirds of a text, with a random gear at each step.

    It is taken at each eighth step: from one step to the next it hardly moves.
    """
    ease, random = ease_of(*TREES), np.random.default_rng(seed)
    kept = []
    for step in range(steps):
        shape, path = choice(random, step), draw(random, levels)
        seen = inside(TREES[shape], path)
        if told is not None:
            told(ease, shape, seen, path)
        else:
            ease.saw(str(shape), 0, seen)
        if step > steps // 3 and step % 8 == 0:
            kept.append(every(ease))
    return np.mean(kept, 0)


def error(levels: list[list[float]], **options: object) -> float:
    """The largest relative error of any tree's estimate, in the mean of three texts.

    Of trees that have a node that no tree which ran has, nothing but hope is known there: they are left out.
    """
    true = np.array([truth(tree, levels) for tree in TREES])
    found = np.mean([learned(levels, seed=seed, **options) for seed in range(3)], 0)
    return float(np.abs(found / true - 1)[ASKED[options.get("choice", CHOICES["random"])]].max())


@pytest.fixture
def own_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Next to no weight for hope, a long memory, and all texts alike: only bias of the counting itself is left."""
    monkeypatch.setattr(module, "WEAK_STRENGTH", 0.1)
    monkeypatch.setattr(module, "MOVES", 0.0)
    monkeypatch.setattr(module, "FADES", 1 - 1 / 20_000)


@pytest.mark.usefixtures("own_counts")
@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
@pytest.mark.parametrize("levels", TRUTHS.values(), ids=TRUTHS)
def test_every_tree_is_estimated_from_every_walk(levels: list[list[float]], choice: Choice) -> None:
    # 2700 autocorrelated steps of each text leave a standard error of 1 to 2 % of the deepest tree's length.
    assert error(levels, choice=choice) < 0.05


@pytest.mark.parametrize("levels", TRUTHS.values(), ids=TRUTHS)
def test_the_weak_prior_biases_little(levels: list[list[float]]) -> None:
    assert error(levels) < 0.12


@pytest.mark.usefixtures("own_counts")
def test_a_walk_that_ends_where_nothing_was_drafted_is_no_miss() -> None:
    def censored_as_miss(ease: Ease, shape: int, seen: tuple[int, ...], path: tuple[int, ...]) -> None:
        for other in range(len(TREES)):
            ease.saw(str(other), 0, seen)

    for levels in (TRUTHS["good"], TRUTHS["first-level-bad"]):
        assert error(levels, choice=CHOICES["mostly-small"], told=censored_as_miss) > 0.15


@pytest.mark.usefixtures("own_counts")
def test_credit_to_another_gear_shows() -> None:
    def next_gear(ease: Ease, shape: int, seen: tuple[int, ...], path: tuple[int, ...]) -> None:
        other = (shape + 1) % len(TREES)
        ease.saw(str(other), 0, inside(TREES[other], seen))

    assert min(error(levels, told=next_gear) for levels in (TRUTHS["good"], TRUTHS["first-level-bad"])) > 0.1


def switching(*steps: int) -> list[float]:
    """Largest errors after these numbers of steps of bad text, after 400 of good."""
    estimates = []
    for seed in range(20):
        ease, random = ease_of(*TREES), np.random.default_rng(seed)
        estimates.append([])
        for step in range(400 + steps[-1] + 1):
            if step - 400 in steps:
                estimates[-1].append(every(ease))
            levels = TRUTHS["good" if step < 400 else "bad"]
            ease.saw("2", 0, inside(TREES[2], draw(random, levels)))
    true = np.array([truth(tree, TRUTHS["bad"]) for tree in TREES])
    return np.abs(np.mean(estimates, 0) / true - 1).max(1).tolist()


def test_a_change_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    first, soon, late = switching(0, 20, 60)
    monkeypatch.setattr(module, "MOVES", 0.0)
    assert late < 0.3 < soon < switching(60)[0] < first


def test_what_texts_have_in_common_is_known_to_the_next_and_fades(monkeypatch: pytest.MonkeyPatch) -> None:
    def next_text(*levels: list[list[float]]) -> float:
        """The expected gain of the deepest tree after 1000 steps of each."""
        gains = Gains(numbered(TREES), None, True)
        ease, random = Ease(gains), np.random.default_rng(0)
        for one in levels:
            for _ in range(1000):
                ease.saw("3", 0, inside(TREES[3], draw(random, one)))
        return Ease(gains).tokens("3")

    bad, good = (truth(TREES[3], TRUTHS[name]) for name in ("bad", "good"))
    assert next_text(TRUTHS["bad"]) == pytest.approx(bad, rel=0.05)
    assert next_text(TRUTHS["good"]) == pytest.approx(good, rel=0.05)
    kept = next_text(TRUTHS["bad"], TRUTHS["good"])
    monkeypatch.setattr(module, "FADES", 1 - 1 / 100)
    assert bad < kept < next_text(TRUTHS["bad"], TRUTHS["good"]) < 1.1 * good


@pytest.mark.usefixtures("own_counts")
def test_a_budget_tree_is_known_by_its_depth() -> None:
    ease, random = Ease(Gains({"budget": Drafted("budget", rows=9, depth=3)}, None, True)), np.random.default_rng(2)
    kept = []
    for step in range(3000):
        ease.saw("budget", 0, (1,) * len(draw(random, [[0.6]] * 3)))
        if step > 500:
            kept.append(ease.tokens("budget"))
    assert np.mean(kept) == pytest.approx(1 + 0.6 + 0.36 + 0.216, rel=0.06)


def test_before_a_step_a_tree_gains_what_was_counted_or_hoped() -> None:
    trees = {"counted": Topology.chain(2), "new": Topology.from_paths([(0,), (1,), (0, 0)])}
    prior = Prior(reached={"counted": (0.6, 0.3)}, first=0.5)
    ease = Ease(Gains({name: drafted(tree, name) for name, tree in trees.items()}, prior, True))
    assert [ease.tokens(name) for name in trees] == pytest.approx([1 + 0.6 + 0.3, 1 + 0.5 + 0.25])
    assert ease_of(Topology.chain(2)).tokens("0") == pytest.approx(1 + HOPE[True] + HOPE[True] ** 2)


def test_a_level_more_never_makes_a_tree_worth_less() -> None:
    ease, random = ease_of(*TREES), np.random.default_rng(4)
    for _ in range(500):
        shape = int(random.integers(4))
        ease.saw(str(shape), 0, inside(TREES[shape], draw(random, TRUTHS["second-rank"])))
        assert 1 <= ease.tokens("0") <= ease.tokens("3") <= 5
