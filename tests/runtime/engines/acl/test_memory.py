"""Arrays on a device: cut, turned and copied as numpy's are."""

from pathlib import Path

import numpy as np
import pytest

from draftwood.runtime.engines.acl.library import Library
from draftwood.runtime.engines.acl.memory import HOST_TO_DEVICE, AclDevice, DeviceArray, cut
from draftwood.runtime.engines.acl.model import Weights
from draftwood.runtime.speculation.kv_cache import grown, token_rows

from .ascendcl import AscendCL


@pytest.fixture
def device() -> AclDevice:
    acl = AscendCL()
    used = AclDevice(Library(acl.handle))
    yield used
    used.library.finish()
    assert acl.done() == []


def filled(device: AclDevice, zeros, shape, start=0):
    """An array [K, C, D] made by ``zeros``, and its values."""
    array = zeros(shape)
    values = np.arange(start, start + array.nbytes // 4, dtype=np.float32)
    device.copy(array.address, values.ctypes.data, array.nbytes, HOST_TO_DEVICE)
    return array


@pytest.mark.parametrize(("by_token", "copies"), [(True, 1), (False, 3)])
def test_growing_copies_what_is_written_in_as_few_pieces_as_it_lies_in(device, by_token, copies) -> None:
    def plain(shape):
        return DeviceArray.zeros(device, "float32", shape)

    zeros = token_rows(plain) if by_token else plain
    old = filled(device, zeros, (3, 8, 4))
    calls = []
    copy = device.copy
    device.copy = lambda *arguments: calls.append(arguments) or copy(*arguments)
    (new,) = grown([old], 16, 5, zeros)
    assert len(calls) == copies
    got, before = np.asarray(new), np.asarray(old)
    assert got.shape == (3, 16, 4) and np.array_equal(got[:, :5], before[:, :5]) and not got[:, 5:].any()


def test_views_are_those_of_numpy(device) -> None:
    array = filled(device, lambda shape: DeviceArray.zeros(device, "float32", shape), (2, 3, 4))
    values = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    assert np.array_equal(np.asarray(array), values)
    assert np.array_equal(np.asarray(array.swapaxes(0, 1)), values.swapaxes(0, 1))
    assert np.array_equal(np.asarray(array[:, :2]), values[:, :2])
    assert np.array_equal(np.asarray(array.ravel()[:12].reshape((3, 4))), values.ravel()[:12].reshape(3, 4))
    with pytest.raises(AssertionError):
        array.swapaxes(0, 1).ravel()


def test_an_empty_array_takes_no_memory(device) -> None:
    empty = DeviceArray.zeros(device, "float32", (2, 0, 4))
    (new,) = grown([empty], 4, 0, lambda shape: DeviceArray.zeros(device, "float32", shape))
    assert empty.address == 0 and not np.asarray(new).any()


def test_pieces_of_a_block_begin_at_64_bytes_and_leave_room() -> None:
    starts, total = cut([1, 32, 33, 640])
    assert starts == [0, 64, 128, 256] and total == 256 + 704
    assert cut([1, 480, 481], 512) == ([0, 512, 1024], 2048)


def test_weights_begin_at_512_bytes_wherever_the_block_does(device, tmp_path: Path) -> None:
    for number, size in enumerate((1, 700, 512, 33)):
        (tmp_path / f"{number}.bin").write_bytes(bytes(size))
    files = Weights(device, tmp_path).files.values()
    assert [address % 512 for address, _ in files] == [0] * 4 and [size for _, size in files] == [32, 704, 512, 64]
