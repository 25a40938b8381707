import numpy as np
import pytest

from draftwood.errors import InvariantError
from draftwood.manifest import BLOCK_SLOTS, TokenRows
from draftwood.runtime.speculation.block_cache import BlockKvCache
from draftwood.runtime.speculation.deferred_cache import Branch, DeferredKvCache
from draftwood.runtime.speculation.kv_cache import KvCache

# Values are narrower than keys; a third buffer has more heads, as no attention here has.
ROWS = [TokenRows(name=name, heads=1, width=width) for name, width in (("key_cache.0", 4), ("value_cache.0", 3))]
OTHER = TokenRows(name="latent_cache.0", heads=2, width=3)
PATHS = {
    "root": ([0], ()),
    "contiguous": ([0, 1, 2], ()),
    "moved": ([0, 2], (2,)),
    "tail-moved": ([0, 1, 4], (4,)),
    "all-moved": ([0, 3, 4], (3, 4)),
}


def made(kind: type[KvCache], slots: int = 128) -> KvCache:
    if issubclass(kind, DeferredKvCache):
        return kind([*ROWS, OTHER], slots, Branch(lambda rows: (rows, 13), 7, padded=False))
    return kind(ROWS if kind is BlockKvCache else [*ROWS, OTHER], slots)


def opened(length: int = 10, rows: int = 7, kind: type[KvCache] = KvCache) -> KvCache:
    cache = made(kind)
    cache.extended(length)
    cache.branched(rows)
    return cache


@pytest.mark.parametrize("length", [10, BLOCK_SLOTS - 2])
@pytest.mark.parametrize("kind", [KvCache, BlockKvCache])
@pytest.mark.parametrize("case", PATHS)
def test_a_commit_puts_the_path_in_place(kind: type[KvCache], case: str, length: int) -> None:
    """Every slot holds its number, across the border of a block too; what is not written stays."""
    path, cache = PATHS[case][0], opened(length, kind=kind)
    for number, buffer in enumerate(cache.buffers):
        heads = np.moveaxis(buffer, 1, 0) if kind is BlockKvCache else buffer
        heads[..., 0] = 1000 * number + np.arange(128).reshape(heads.shape[1:-1])
    cache.commit(path)
    cache.check()
    want = np.arange(128)
    want[length : length + len(path)] = length + np.array(path)
    assert (cache.length, cache.placed, cache.open_rows) == (length + len(path), length + len(path), 0)
    for number, buffer in enumerate(cache.buffers):
        assert cache.text(buffer, 128)[0, :, 0].tolist() == (1000 * number + want).tolist()


@pytest.mark.parametrize("case", PATHS)
def test_a_late_commit_moves_only_what_is_out_of_place(case: str) -> None:
    (path, moved), cache = PATHS[case], opened(kind=DeferredKvCache)
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
    cache = opened(kind=DeferredKvCache)
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
    cache = opened(rows=3, kind=DeferredKvCache)
    assert cache.branch.shape == (3, 13)
    assert not np.shares_memory(cache.branch, cache.next_branch(7))
    assert DeferredKvCache(ROWS, 128, Branch(lambda rows: (rows, 7), 9)).branch.shape == (9, 7)


@pytest.mark.parametrize("kind", [KvCache, BlockKvCache, DeferredKvCache])
def test_a_copy_holds_the_beginning_and_nothing_of_the_branch(kind: type[KvCache]) -> None:
    cache = opened(kind=kind)
    for buffer in cache.buffers:
        buffer[:] = np.arange(buffer.size).reshape(buffer.shape)
    cache.commit([0, 3])
    other = cache.copied(9, 192)
    other.check()
    assert (other.length, other.placed, other.slots) == (9, 9, 192)
    for new, old in zip(other.buffers, cache.buffers, strict=True):
        assert np.array_equal(other.text(new, 9), cache.text(old, 9)) and not np.shares_memory(new, old)
    with pytest.raises(InvariantError, match="copy"):
        cache.copied(cache.placed + 1, 192)
