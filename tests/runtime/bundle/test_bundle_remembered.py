"""Hashing is paid once on a machine, for files that have not changed since."""

import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from draftwood.errors import BundleError
from draftwood.runtime.bundle import Bundle, remembered


@pytest.fixture
def copy(tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = Path(shutil.copytree(tiny_bundle, tmp_path / "copy"))
    # As if an hour had passed; the change to the inode is dated now, so the clock has to go on.
    for path in folder.rglob("*"):
        os.utime(path, ns=(0, 0))
    later = SimpleNamespace(time_ns=lambda: time.time_ns() + 3600 * 10**9)
    monkeypatch.setattr(remembered, "time", later)
    return folder


def opened(folder: Path) -> str:
    return Bundle.open(folder).verified


def test_the_second_opening_is_fast(copy: Path) -> None:
    assert [opened(copy) for _ in range(3)] == ["full", "fast", "fast"]
    assert Bundle.open(copy, "full").verified == "full"


def test_a_file_that_was_touched_is_looked_at_again(copy: Path) -> None:
    opened(copy)
    os.utime(copy / "onnx" / "step.onnx")
    assert [opened(copy) for _ in range(2)] == ["full", "fast"]


def test_a_byte_changed_behind_the_file_times_is_noticed(copy: Path) -> None:
    opened(copy)
    path = copy / "onnx" / "weights.safetensors"
    data, times = bytearray(path.read_bytes()), path.stat()
    data[-1] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(BundleError, match="altered"):
        opened(copy)
    assert Bundle.open(copy, "fast").verified == "fast"


def test_what_was_refused_is_not_remembered(copy: Path) -> None:
    tree = copy / "trees" / "ragged.json"
    tree.write_bytes(tree.read_bytes()[:-1] + b" ")
    for _ in range(2):
        with pytest.raises(BundleError, match="altered"):
            opened(copy)


def test_a_home_that_is_a_file_or_missing_does_not_matter(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (copy.parent / "file").write_text("")
    for home in (copy.parent / "file", Path("/dev/null")):
        monkeypatch.setattr("draftwood.runtime.bundle.remembered.cache_home", lambda home=home: home)
        assert [opened(copy) for _ in range(2)] == ["full", "full"]


def test_a_file_that_has_just_changed_is_not_remembered(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftwood.runtime.bundle.remembered._TICK_NS", 10**18)
    assert [opened(copy) for _ in range(2)] == ["full", "full"]
