"""Places of a pool: views of one memory, given back with the last reference, and clean when they are taken again."""

from __future__ import annotations

import numpy as np

from draftwood.manifest import TokenRows
from draftwood.runtime.engines.pools import PooledDraft, PooledKv, Pools
from draftwood.runtime.speculation.deferred_cache import Branch
from draftwood.runtime.speculation.kv_cache import host_zeros

# Values are narrower than keys.
ROWS = [
    TokenRows(name=f"{side}_cache.{layer}", heads=2, width=width)
    for layer in range(2)
    for side, width in (("key", 4), ("value", 3))
]
DRAFTS = [TokenRows(name="draft_cache", heads=2, width=5)]
BRANCH = Branch(lambda rows: (rows, sum(each.elements() for each in ROWS)), 3)
PLACES = 3


def kv(pools: Pools, slots: int = 8) -> PooledKv:
    return PooledKv(ROWS, slots, BRANCH, host_zeros, pools)


def test_a_text_holds_its_part_of_the_pool() -> None:
    pools = Pools(ROWS, DRAFTS, PLACES, host_zeros)
    texts = [kv(pools) for _ in range(PLACES)]
    for number, text in enumerate(texts):
        for layer, buffer in enumerate(text.buffers):
            buffer[:] = 10 * number + layer
    pool = texts[0].place.pool
    for layer, cache in enumerate(pool.window(1, 2)):
        assert cache.shape == (2, 16, ROWS[layer].width)
        np.testing.assert_array_equal(cache[:, :8], 10 + layer)
        np.testing.assert_array_equal(cache[:, 8:], 20 + layer)


def test_the_lowest_place_is_taken_again_and_is_clean() -> None:
    pools = Pools(ROWS, DRAFTS, PLACES, host_zeros)
    texts = [kv(pools) for _ in range(PLACES)]
    for buffer in texts[1].buffers:
        buffer[:] = np.nan
    texts[1].place.drafts[0][:] = np.nan
    del texts[1], buffer
    again = kv(pools)
    assert (again.place.number, again.place.pool) == (1, texts[0].place.pool)
    assert all(not buffer.any() for buffer in (*again.buffers, *again.place.drafts))


def test_more_texts_than_places_take_another_pool() -> None:
    pools = Pools(ROWS, DRAFTS, PLACES, host_zeros)
    texts = [kv(pools) for _ in range(PLACES + 1)]
    assert [text.place.number for text in texts] == [0, 1, 2, 0]
    assert texts[-1].place.pool is not texts[0].place.pool


def test_a_text_that_grows_leaves_its_place() -> None:
    pools = Pools(ROWS, DRAFTS, PLACES, host_zeros)
    text = kv(pools)
    for buffer in text.buffers:
        buffer[:, :4] = 7
    text.length, before = 4, text.place.pool
    text.grow(16)
    assert before.free == set(range(PLACES)) and text.place.pool.slots == 16
    assert all((buffer[:, :4] == 7).all() and not buffer[:, 4:].any() for buffer in text.buffers)


def test_a_drafters_cache_follows_the_teachers() -> None:
    pools = Pools(ROWS, DRAFTS, PLACES, host_zeros)
    text, neighbour = kv(pools), kv(pools)
    draft = PooledDraft(DRAFTS, 6, host_zeros, text)
    draft.buffers[0][:, :3], draft.length, before = 7, 3, text.place.pool
    np.testing.assert_array_equal(before.draft_window(0, 2)[0][:2], draft.buffers[0])
    np.testing.assert_array_equal(before.draft_window(0, 2)[0][2:], neighbour.place.drafts[0])
    text.grow(16)
    assert before.free == {2}  # its rows are not copied yet
    draft.reserve(16)
    assert before.free == {0, 2}
    assert draft.buffers[0].shape == (2, 16, 5) and draft.buffers[0] is text.place.drafts[0]
    assert (draft.buffers[0][:, :3] == 7).all() and not draft.buffers[0][:, 3:].any()
