"""Plans from counts of trained drafters: real counts, unlike those that other tests make up."""

from pathlib import Path

import pytest

from draftwood.tests import fixtures
from draftwood.trees.prior import counted_prior
from draftwood.trees.search import search

BOTH = pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])


@BOTH
@pytest.mark.parametrize("drafter", fixtures.DRAFTERS, ids=lambda drafter: drafter.name)
def test_a_tree_promises_less_than_it_has_levels(sampled: bool, drafter: Path) -> None:
    counted = fixtures.counted(drafter, sampled)
    assert counted.contexts.total > 2_000 and counted.grouped
    assert counted.sampled == (counted.contexts.total if sampled else 0)
    best = search(counted.contexts, 15)
    assert 1.5 < best.curve()[15] < 1 + best.tree(15).depth


@BOTH
@pytest.mark.parametrize("drafter", fixtures.DRAFTERS[1:], ids=lambda drafter: drafter.name)
def test_texts_behind_documents_are_believed_to_be_harder(drafter: Path, sampled: bool) -> None:
    """By every drafter that looks at the text; Medusa's heads look at one state."""
    prior = counted_prior(fixtures.counted(drafter, sampled).contexts, {})
    assert [one.tokens for one in prior.lengths] == [0, 256, 512, 1024]
    assert prior.ease_at(0) > prior.ease_at(1024) + 0.1
