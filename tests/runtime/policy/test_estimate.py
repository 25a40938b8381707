"""The estimator against texts of a known truth, and the mistakes that must show."""

from collections.abc import Callable

import numpy as np
import pytest

from draftwood.runtime.policy import estimate as module
from draftwood.runtime.policy import prior
from draftwood.runtime.policy.estimate import Estimate
from draftwood.runtime.policy.forest import Forest, Levels
from draftwood.runtime.policy.prior import tables
from draftwood.trees import Topology

from .samples import draw, inside, truth

TREES = (Topology.chain(1), Topology.full([2, 1]), Topology.backbone(3, 2), Topology.chain(4))
TRUTHS = {
    "good": ([0.8, 0.1],) * 4,
    "bad": ([0.2, 0.1],) * 4,
    "first-level-bad": ([0.5, 0.05], *([0.95, 0.02],) * 3),
    "second-rank": ([0.3, 0.5], [0.4, 0.4], [0.3, 0.2], [0.1, 0.1]),
}
Choice = Callable[[np.random.Generator, int], int]
CHOICES: dict[str, Choice] = {
    "random": lambda random, step: int(random.integers(len(TREES))),
    "mostly-small": lambda random, step: 0 if random.random() < 0.7 else 2 + int(random.integers(2)),
}


def learned(
    levels: list[list[float]],
    choice: Choice = CHOICES["random"],
    seed: int = 0,
    steps: int = 4000,
    ranked: bool = False,
    told: Callable[[Estimate, int, tuple[int, ...], tuple[int, ...]], None] | None = None,
) -> np.ndarray:
    """Mean estimate of every tree over the last two thirds of a text, with a random gear at each step."""
    forest = Forest([(tree,) for tree in TREES])
    estimate, random = Estimate(tables(forest, None, True)), np.random.default_rng(seed)
    kept = []
    for step in range(steps):
        shape, path = choice(random, step), draw(random, levels)
        seen = inside(TREES[shape], path)
        if told is not None:
            told(estimate, shape, seen, path)
        else:
            rank = path[len(seen)] if len(path) > len(seen) else 99
            estimate.walked(shape, 0, seen, rank if ranked and len(seen) < len(levels) else None)
        if step > steps // 3:
            kept.append(estimate.tokens())
    return np.mean(kept, 0)


def error(levels: list[list[float]], **options: object) -> float:
    """The largest relative error of any tree's estimate."""
    true = np.array([truth(tree, levels) for tree in TREES])
    return float(np.abs(learned(levels, **options) / true - 1).max())


@pytest.fixture
def own_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Next to no weight for the mixture and a long memory: what is left is bias of the counting itself."""
    monkeypatch.setattr(prior, "WEAK_STRENGTH", 0.5)
    monkeypatch.setattr(module, "FADING", 1 - 1 / 1000)


@pytest.mark.usefixtures("own_counts")
@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
@pytest.mark.parametrize("ranked", [True, False], ids=["ranked", "trees"])
@pytest.mark.parametrize("levels", TRUTHS.values(), ids=TRUTHS)
def test_every_tree_is_estimated_from_every_walk(levels: list[list[float]], ranked: bool, choice: Choice) -> None:
    # 2700 autocorrelated steps leave a standard error of 1 to 1.5 % of the deepest tree's length.
    assert error(levels, ranked=ranked, choice=choice) < 0.05


@pytest.mark.parametrize("levels", TRUTHS.values(), ids=TRUTHS)
def test_the_weak_prior_biases_little(levels: list[list[float]]) -> None:
    # At a node that a step in two asks for, 3 of 28 answers are the mixture's; it is off by 0.6 at the most.
    assert error(levels) < 0.12


@pytest.mark.usefixtures("own_counts")
def test_a_walk_that_ends_where_nothing_was_drafted_is_no_miss() -> None:
    def censored_as_miss(estimate: Estimate, shape: int, seen: tuple[int, ...], path: tuple[int, ...]) -> None:
        estimate.walked(shape, 0, seen, 99)

    for levels in (TRUTHS["good"], TRUTHS["first-level-bad"]):
        assert error(levels, choice=CHOICES["mostly-small"], told=censored_as_miss) > 0.15


@pytest.mark.usefixtures("own_counts")
def test_a_rank_beyond_the_candidates_is_a_miss() -> None:
    def dropped(estimate: Estimate, shape: int, seen: tuple[int, ...], path: tuple[int, ...]) -> None:
        if len(path) > len(seen):
            estimate.walked(shape, 0, seen, path[len(seen)])
        elif len(seen) == TREES[shape].depth:
            estimate.walked(shape, 0, seen)

    assert error(TRUTHS["bad"], told=dropped) > 0.15


@pytest.mark.usefixtures("own_counts")
def test_credit_to_another_gear_shows() -> None:
    def next_gear(estimate: Estimate, shape: int, seen: tuple[int, ...], path: tuple[int, ...]) -> None:
        other = (shape + 1) % len(TREES)
        estimate.walked(other, 0, inside(TREES[other], seen))

    assert min(error(levels, told=next_gear) for levels in (TRUTHS["good"], TRUTHS["first-level-bad"])) > 0.1


def switching() -> float:
    """Largest error at the end of 60 steps of bad text behind 400 of good."""
    forest = Forest([(tree,) for tree in TREES])
    errors = []
    for seed in range(20):
        estimate, random = Estimate(tables(forest, None, True)), np.random.default_rng(seed)
        for levels in [TRUTHS["good"]] * 400 + [TRUTHS["bad"]] * 60:
            estimate.walked(2, 0, inside(TREES[2], draw(random, levels)))
            estimate.tokens()
        errors.append(estimate.tokens())
    true = np.array([truth(tree, TRUTHS["bad"]) for tree in TREES])
    return float(np.abs(np.mean(errors, 0) / true - 1).max())


def test_a_change_is_noticed_and_what_is_old_fades(monkeypatch: pytest.MonkeyPatch) -> None:
    known = switching()
    monkeypatch.setattr(module, "CHANGE", 0.0)
    faded = switching()
    monkeypatch.setattr(module, "FADING", 1.0)
    assert known < 0.15 < 0.6 < faded < 1.0 < switching()


@pytest.mark.usefixtures("own_counts")
def test_trees_that_do_not_contain_each_other_share_what_is_known() -> None:
    trees = (Topology.from_paths([(0,), (2,)]), Topology.from_paths([(0,), (1,)]), Topology.from_paths([(1,), (3,)]))
    levels = [[0.4, 0.3, 0.1, 0.1]]
    estimate, random = Estimate(tables(Forest([(tree,) for tree in trees]), None, True)), np.random.default_rng(3)
    kept = []
    for step in range(4000):
        shape = int(random.integers(3))
        estimate.walked(shape, 0, inside(trees[shape], draw(random, levels)))
        if step > 500:
            kept.append(estimate.tokens())
    assert np.mean(kept, 0) == pytest.approx([truth(tree, levels) for tree in trees], rel=0.06)


@pytest.mark.usefixtures("own_counts")
def test_confidence_classes_have_roots_of_their_own() -> None:
    shape = (Topology.chain(2), Topology.chain(3))
    estimate, random = Estimate(tables(Forest([shape]), None, True)), np.random.default_rng(1)
    kept = []
    for step in range(4000):
        root = int(random.random() < 0.25)
        path = draw(random, [[0.9 if root else 0.3]] * 3)
        estimate.walked(0, root, inside(shape[root], path))
        if step > 500:
            kept.append(estimate.tokens()[0])
    true = 0.75 * (1 + 0.3 + 0.09) + 0.25 * (1 + 0.9 + 0.81 + 0.729)
    assert np.mean(kept) == pytest.approx(true, rel=0.06)


@pytest.mark.usefixtures("own_counts")
def test_a_budget_tree_is_known_by_its_depth() -> None:
    estimate, random = Estimate(tables(Forest([Levels(3, 2)]), None, True)), np.random.default_rng(2)
    kept = []
    for step in range(3000):
        depth = len(draw(random, [[0.6]] * 3))
        estimate.walked(0, estimate.tables.forest.root_of(0, 0), (1,) * depth)
        if step > 500:
            kept.append(estimate.tokens()[0])
    assert np.mean(kept) == pytest.approx(1 + 0.6 + 0.36 + 0.216, rel=0.06)


def test_without_a_walk_the_estimate_is_the_mixture() -> None:
    known = tables(Forest([(tree,) for tree in TREES]), None, False)
    expected = np.array(known.weights_C) @ known.tokens_CS
    np.testing.assert_allclose(Estimate(known).tokens(), expected, rtol=1e-9)  # products of at most 20 factors


def test_a_child_more_never_makes_a_tree_worth_less() -> None:
    estimate, random = Estimate(tables(Forest([(tree,) for tree in TREES]), None, True)), np.random.default_rng(4)
    smaller, larger = 0, 3
    for _ in range(500):
        shape = int(random.integers(4))
        estimate.walked(shape, 0, inside(TREES[shape], draw(random, TRUTHS["second-rank"])))
        tokens = estimate.tokens()
        assert 1 <= tokens[smaller] <= tokens[larger] <= 5
