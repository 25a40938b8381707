import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood.errors import TreeError
from draftwood.trees.calibration import BINS, Calibration
from draftwood.trees.confidence import best_bounds, split
from draftwood.trees.search import search

from .samples import COUNTED, FIXED, PATHS, calibrated


def with_confidence(items):
    calibration = Calibration()
    for path, confidence_bin in items:
        calibration.add(path, group=COUNTED, confidence=(confidence_bin + 0.5) / BINS)
    return calibration.contexts


ITEMS = st.lists(st.tuples(PATHS, st.sampled_from([0, 7, 20, 31])), min_size=1, max_size=12)


@FIXED
@given(ITEMS, st.lists(st.integers(1, BINS - 1), unique=True, max_size=3).map(sorted))
def test_every_context_is_in_the_class_of_its_bin(items, bounds):
    contexts = with_confidence(items)
    classes = split(contexts, tuple(bounds))
    edges = [0, *bounds, BINS]
    sizes = [sum(low <= place < high for _, place in items) for low, high in itertools.pairwise(edges)]
    assert [part.total for part in classes] == sizes


def tokens(contexts, bounds, nodes):
    total = 0.0
    for part in split(contexts, bounds):
        curve = search(part, nodes).curve()
        total += part.total * sum(curve[min(n, len(curve) - 1)] for n in range(1, nodes + 1)) / nodes
    return total


@FIXED
@given(ITEMS, st.integers(1, 4))
def test_two_classes_are_never_worse_than_one(items, nodes):
    contexts = with_confidence(items)
    try:
        bounds = best_bounds(contexts, 2, nodes)
    except TreeError as error:
        # One bin, or one so heavy that all others fall into its group.
        assert "expected 1 to 1 classes" in str(error)
        return
    assert all(part.total for part in split(contexts, bounds))
    assert tokens(contexts, bounds, nodes) >= tokens(contexts, (), nodes) - 1e-9


def test_two_kinds_of_contexts_are_told_apart():
    items = [((0, 0), 31)] * 10 + [((1,), 2)] * 10
    bounds = best_bounds(with_confidence(items), 2, 2)
    assert 2 < bounds[0] <= 31


def test_exhaustive_over_bins_of_equal_weight():
    paths = [(0, 0, 0), (0, 0), (0,), (1,), (1, 0), (2,), (2, 0), ()]
    contexts = with_confidence([(path, 4 * place) for place, path in enumerate(paths) for _ in range(3)])

    for classes in (2, 3):
        every = itertools.combinations([4 * place for place in range(1, 8)], classes - 1)
        best = max(tokens(contexts, bounds, 2) for bounds in every)
        assert tokens(contexts, best_bounds(contexts, classes, 2), 2) == pytest.approx(best, abs=1e-9)


def test_classes_need_confidences_and_enough_of_them():
    with pytest.raises(TreeError, match="needs the confidence of every context"):
        best_bounds(calibrated({(0,): 3}).contexts, 2, 3)
    for classes in (0, 2):
        with pytest.raises(TreeError, match="expected 1 to 1 classes"):
            best_bounds(calibrated({(0,): 3}, confidence=0.5).contexts, classes, 3)
