import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood.trees import Topology
from draftwood.trees.calibration import END, FOLDS, Calibration, Contexts, fold_of
from draftwood.trees.measure import curve, mean_of_folds, standard_error, tokens, visits

from .samples import COUNTS, FIXED, PATHS, accept_length, contexts, gain, prefixes

TREES = st.lists(PATHS.filter(bool), max_size=4).map(lambda paths: Topology.from_paths(prefixes(paths)))


@FIXED
@given(COUNTS, TREES)
def test_accept_length_equals_a_walk_of_every_path(counts, tree):
    expected = accept_length(contexts(counts), tree)
    assert expected.tokens == pytest.approx(float(gain(counts, tree.paths)), abs=1e-12)
    assert expected.contexts == sum(counts.values())


@FIXED
@given(COUNTS, st.lists(TREES, min_size=1, max_size=4))
def test_many_trees_at_once(counts, trees):
    total = sum(counts.values())
    assert tokens(contexts(counts), trees).tolist() == [gain(counts, tree.paths) * total for tree in trees]


@FIXED
@given(st.dictionaries(st.tuples(PATHS, st.sampled_from(["a", "b", "c"])), st.integers(1, 5), min_size=1), TREES)
def test_visits_are_kept_apart_by_fold(counts, tree):
    calibration = Calibration()
    for (path, text), count in counts.items():
        for _ in range(count):
            calibration.add(path, group=text)
    visits_FT = visits(calibration.contexts, tree)
    for text in "abc":
        for row, node in enumerate([(), *tree.paths]):
            passing = sum(n for (path, name), n in counts.items() if name == text and path[: len(node)] == node)
            assert visits_FT[fold_of(text), row] == passing
    assert visits_FT.sum() == sum(visits_FT[fold_of(text)].sum() for text in "abc")


def test_a_rank_beyond_every_path_is_never_taken():
    assert accept_length(contexts({(0,): 1, (): 1}), Topology.from_paths([(END,), (300,)])).tokens == 1


def test_curve_is_of_the_first_nodes():
    counts = {(0, 0): 2, (1,): 1, (): 1}
    assert curve(contexts(counts), [(0,), (0, 0), (1,)]).tolist() == [1, 1.5, 2, 2.25]


def test_interval_by_hand():
    sums_F, contexts_F = np.zeros(FOLDS), np.zeros(FOLDS)
    sums_F[[3, 9, 20]], contexts_F[[3, 9, 20]] = [10, 30, 20], [5, 10, 5]
    # mean 3; residuals -5, 0, 5; variance 3/2 * 50 / 20^2; t of 2 degrees is 4.303
    found = mean_of_folds(sums_F, contexts_F)
    assert found.tokens == 3 and found.contexts == 20
    assert found.interval == pytest.approx((3 - 4.303 * 0.1875**0.5, 3 + 4.303 * 0.1875**0.5))


def test_no_interval_from_one_fold_and_nothing_from_none():
    sums_F, contexts_F = np.zeros(FOLDS), np.zeros(FOLDS)
    assert mean_of_folds(sums_F, contexts_F) is None
    sums_F[0], contexts_F[0] = 3, 2
    assert mean_of_folds(sums_F, contexts_F).interval is None
    assert standard_error(sums_F, contexts_F) == np.inf


def test_interval_covers_the_truth_although_contexts_of_a_text_are_alike():
    """Every text is either easy or hard: an interval over single contexts would cover far too rarely."""
    random, covered, naive, rounds, each = np.random.default_rng(1), 0, 0, 400, 50
    for _ in range(rounds):
        easy_F = random.random(16) < 0.5
        hits_F = random.binomial(each, np.where(easy_F, 0.9, 0.3))
        sums_F, contexts_F = np.zeros(FOLDS), np.zeros(FOLDS)
        sums_F[:16], contexts_F[:16] = each + hits_F, each
        low, high = mean_of_folds(sums_F, contexts_F).interval
        covered += low <= 1.6 <= high
        share = hits_F.sum() / (16 * each)
        naive += abs(share - 0.6) <= 1.96 * (share * (1 - share) / (16 * each)) ** 0.5
    # 95 % of 400 is 380; three standard deviations of that count are 13.
    assert covered >= 367 and naive < 250


def test_weights_count_like_repetitions():
    ranks = np.array([[0, END], [0, 1]], np.uint8)
    zeros = np.zeros(2, np.uint8)
    weighted = Contexts(ranks, np.array([3, 2]), zeros, zeros, np.zeros(2, np.uint16))
    assert tokens(weighted, [Topology.from_paths([(0,), (0, 1)])]).tolist() == [12]
