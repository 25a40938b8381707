"""The estimator against texts of a known truth, and the mistakes that must show."""

from collections.abc import Callable

import numpy as np
import pytest

from draftwood.runtime.policy import estimate as module
from draftwood.runtime.policy import prior
from draftwood.runtime.policy.estimate import Acceptance, Estimate
from draftwood.runtime.policy.forest import Forest, Levels, Shape
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


def estimate_of(*shapes: Shape, greedy: bool = True) -> Estimate:
    """The first text of a bundle of which nothing was counted."""
    return Estimate(Acceptance(tables(Forest(shapes), None, greedy)))


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
    ranked: bool = False,
    told: Callable[[Estimate, int, tuple[int, ...], tuple[int, ...]], None] | None = None,
) -> np.ndarray:
    """Mean estimate of every tree over the last two thirds of a text, with a random gear at each step."""
    estimate, random = estimate_of(*((tree,) for tree in TREES)), np.random.default_rng(seed)
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
    """The largest relative error of any tree's estimate, in the mean of three texts.

    Of trees that have a node that no tree which ran has, nothing but hope is known there: they are left out.
    """
    true = np.array([truth(tree, levels) for tree in TREES])
    found = np.mean([learned(levels, seed=seed, **options) for seed in range(3)], 0)
    return float(np.abs(found / true - 1)[ASKED[options.get("choice", CHOICES["random"])]].max())


@pytest.fixture
def own_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Next to no weight for hope, a long memory, and all texts alike: what is left is bias of the counting itself."""
    monkeypatch.setattr(prior, "WEAK_STRENGTH", 0.1)
    monkeypatch.setattr(module, "SPREAD", 1e-3)
    monkeypatch.setattr(module, "MEMORY", 20_000)


@pytest.mark.usefixtures("own_counts")
@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
@pytest.mark.parametrize("ranked", [True, False], ids=["ranked", "trees"])
@pytest.mark.parametrize("levels", TRUTHS.values(), ids=TRUTHS)
def test_every_tree_is_estimated_from_every_walk(levels: list[list[float]], ranked: bool, choice: Choice) -> None:
    # 2700 autocorrelated steps of each text leave a standard error of 1 to 2 % of the deepest tree's length.
    assert error(levels, ranked=ranked, choice=choice) < 0.05


@pytest.mark.parametrize("levels", TRUTHS.values(), ids=TRUTHS)
def test_the_weak_prior_biases_little(levels: list[list[float]]) -> None:
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


def switching(steps: int) -> float:
    """Largest error at the end of so many steps of bad text behind 400 of good."""
    errors = []
    for seed in range(20):
        estimate, random = estimate_of(*((tree,) for tree in TREES)), np.random.default_rng(seed)
        for levels in [TRUTHS["good"]] * 400 + [TRUTHS["bad"]] * steps:
            estimate.walked(2, 0, inside(TREES[2], draw(random, levels)))
        errors.append(estimate.tokens())
    true = np.array([truth(tree, TRUTHS["bad"]) for tree in TREES])
    return float(np.abs(np.mean(errors, 0) / true - 1).max())


def test_a_change_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    first, soon, late = (switching(steps) for steps in (0, 20, 60))
    monkeypatch.setattr(module, "SPREAD", 1e-3)
    assert late < 0.5 < soon < switching(60) < first


def test_what_texts_have_in_common_is_known_to_the_next_and_fades(monkeypatch: pytest.MonkeyPatch) -> None:
    def next_text(*levels: list[list[float]]) -> float:
        """What the deepest tree is thought to be worth after 1000 steps of each."""
        estimate, random = estimate_of(*((tree,) for tree in TREES)), np.random.default_rng(0)
        for one in levels:
            for _ in range(1000):
                estimate.walked(3, 0, inside(TREES[3], draw(random, one)))
        return Estimate(estimate.acceptance).tokens()[3]

    bad, good = (truth(TREES[3], TRUTHS[name]) for name in ("bad", "good"))
    assert next_text(TRUTHS["bad"]) == pytest.approx(bad, rel=0.05)
    assert next_text(TRUTHS["good"]) == pytest.approx(good, rel=0.05)
    kept = next_text(TRUTHS["bad"], TRUTHS["good"])
    monkeypatch.setattr(module, "MEMORY", 100)
    assert bad < kept < next_text(TRUTHS["bad"], TRUTHS["good"]) < 1.1 * good


@pytest.mark.usefixtures("own_counts")
def test_trees_that_do_not_contain_each_other_share_what_is_known() -> None:
    trees = (Topology.from_paths([(0,), (2,)]), Topology.from_paths([(0,), (1,)]), Topology.from_paths([(1,), (3,)]))
    levels = [[0.4, 0.3, 0.1, 0.1]]
    estimate, random = estimate_of(*((tree,) for tree in trees)), np.random.default_rng(3)
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
    estimate, random = estimate_of(shape), np.random.default_rng(1)
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
    estimate, random = estimate_of(Levels(3, 2)), np.random.default_rng(2)
    kept = []
    for step in range(3000):
        depth = len(draw(random, [[0.6]] * 3))
        estimate.walked(0, Forest([Levels(3, 2)]).root_of(0, 0), (1,) * depth)
        if step > 500:
            kept.append(estimate.tokens()[0])
    assert np.mean(kept) == pytest.approx(1 + 0.6 + 0.36 + 0.216, rel=0.06)


def test_without_a_walk_the_estimate_is_what_was_believed() -> None:
    estimate = estimate_of(*((tree,) for tree in TREES), greedy=False)
    chance = dict(zip(estimate.acceptance.tables.forest.path, estimate.acceptance.tables.chance_M, strict=True))
    expected = [1 + sum(np.prod([chance[p[: i + 1]] for i in range(len(p))]) for p in tree.paths) for tree in TREES]
    np.testing.assert_allclose(estimate.tokens(), expected, rtol=1e-9)  # products of at most 4 factors


def test_a_child_more_never_makes_a_tree_worth_less() -> None:
    estimate, random = estimate_of(*((tree,) for tree in TREES)), np.random.default_rng(4)
    smaller, larger = 0, 3
    for _ in range(500):
        shape = int(random.integers(4))
        estimate.walked(shape, 0, inside(TREES[shape], draw(random, TRUTHS["second-rank"])))
        tokens = estimate.tokens()
        assert 1 <= tokens[smaller] <= tokens[larger] <= 5
