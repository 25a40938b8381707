import numpy as np
import pytest

from draftwood.errors import InvariantError
from draftwood.manifest import Dims
from draftwood.runtime.speculation.kv_cache import KvCache

DIMS = Dims(layers=1, hidden=8, heads=1, kv_heads=1, head_dim=4, vocabulary=9, branch_rows=7, path_rows=3, context=127)


def opened(length: int = 10, rows: int = 7) -> KvCache:
    cache = KvCache(DIMS, 128)
    cache.extended(length)
    cache.branched(rows)
    return cache


@pytest.mark.parametrize(
    ("path", "moved"),
    [([0], ()), ([0, 1, 2], ()), ([0, 2], (2,)), ([0, 1, 4], (4,)), ([0, 3, 4], (3, 4))],
    ids=["root", "contiguous", "moved", "tail-moved", "all-moved"],
)
def test_commit_moves_only_what_is_out_of_place(path: list[int], moved: tuple[int, ...]) -> None:
    cache = opened()
    cache.commit(path)
    cache.check()
    assert (cache.length, cache.moved, cache.open_rows) == (10 + len(path), moved, 0)


@pytest.mark.parametrize("path", [[], [1], [0, 3, 2], [0, 7], [0, 0]], ids=str)
def test_commit_refuses_what_is_no_path(path: list[int]) -> None:
    with pytest.raises(InvariantError, match="commit"):
        opened().commit(path)


def test_nothing_is_committed_twice() -> None:
    cache = opened()
    cache.commit([0])
    with pytest.raises(InvariantError, match="commit"):
        cache.commit([0])


@pytest.mark.parametrize(("length", "moved"), [(13, (3, 4)), (12, (3,)), (11, ()), (4, ())], ids=str)
def test_rollback_drops_pending_rows_first(length: int, moved: tuple[int, ...]) -> None:
    cache = opened()
    cache.commit([0, 3, 4])
    cache.rollback(length)
    cache.check()
    assert (cache.length, cache.moved) == (length, moved)


def test_rollback_never_grows_a_text() -> None:
    with pytest.raises(InvariantError, match="rollback"):
        opened().rollback(11)


def test_growing_keeps_the_committed_slots_and_hands_out_new_buffers() -> None:
    cache = opened()
    for i, buffer in enumerate(cache.buffers):
        buffer[:] = np.arange(buffer.size).reshape(buffer.shape) + i
    before, old = [buffer[:, :10].copy() for buffer in cache.buffers], cache.buffers
    cache.grow(256)
    assert cache.slots == 256 and cache.buffers is not old
    assert all(np.array_equal(new[:, :10], kept) for new, kept in zip(cache.buffers, before, strict=True))
    with pytest.raises(InvariantError, match="grow"):
        cache.grow(128)


def test_the_spare_slot_is_never_promised() -> None:
    cache = opened(length=120)
    assert cache.room(7) and not cache.room(8)
    cache.length = 121
    with pytest.raises(InvariantError, match="spare"):
        cache.check()


def test_a_branch_is_written_beside_the_one_being_read() -> None:
    cache = opened(rows=3)
    assert cache.branch.shape == (1, 2, 3, 1, 4)
    assert not np.shares_memory(cache.branch, cache.next_branch(7))
    assert KvCache(DIMS, 128, padded=9).branch.shape[2] == 9


def filled(cache: KvCache) -> KvCache:
    """Every slot of the caches, and every row of the branch, tells where it stands."""
    for number, buffer in enumerate(cache.buffers):
        buffer[0, :, 0] = 1000 * (number + 1) + np.arange(cache.slots)
    for row in range(cache.branch.shape[2]):
        cache.branch[0, :, row, 0, 0] = [-1 - row, -101 - row]
    return cache


def test_the_last_token_is_written_again_from_the_branch_that_has_it() -> None:
    cache = filled(opened())
    cache.commit([0, 1, 2])
    assert cache.again() == (2,)
    assert cache.branch[0, :, 2, 0, 0].tolist() == [-3, -103]


@pytest.mark.parametrize("how", ["prompt", "rollback", "opened"])
def test_the_last_token_is_copied_where_no_branch_has_it(how: str) -> None:
    cache = opened()
    if how == "rollback":
        cache.commit([0, 1, 2])
        cache.rollback(11)
    elif how == "opened":  # a branch that nothing was committed of
        cache.rollback(10)
    else:
        cache = KvCache(DIMS, 128)
        cache.extended(12)
    filled(cache)
    assert cache.again() == (0,) == cache.again()
    last = cache.length - 1
    assert cache.branch[0, :, 0, 0, 0].tolist() == [1000 + last, 2000 + last]


def test_an_empty_text_has_no_last_token() -> None:
    assert KvCache(DIMS, 128).again() == ()
