"""A folder appears whole or not at all, and one process at a time makes it."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from draftwood.compiler.bundle.build import build
from draftwood.compiler.bundle.request import BuildRequest
from draftwood.compiler.bundle.staging import exclusive, staged
from draftwood.errors import RequestError
from draftwood.trees import Topology

# Begins a folder, says so, and never ends.
HOLD = """
import sys, time
from pathlib import Path
from draftwood.compiler.bundle.staging import staged
with staged(Path(sys.argv[1])) as folder:
    (folder / "half").write_text("x" * 100)
    print("begun", flush=True)
    time.sleep(600)
"""


def begin(out: Path) -> subprocess.Popen:
    """Another process in the middle of making ``out``."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(out)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "begun\n"
    return process


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_whole_or_not_at_all(tmp_path: Path) -> None:
    with pytest.raises(ValueError), staged(tmp_path / "out") as folder:
        (folder / "file").write_text("x")
        raise ValueError
    assert names(tmp_path) == []
    with staged(tmp_path / "out") as folder:
        (folder / "file").write_text("x")
        assert names(tmp_path) == [".out.lock", ".out.partial"]
    assert names(tmp_path) == ["out"] and (tmp_path / "out" / "file").read_text() == "x"


def test_a_killed_build_is_swept_by_the_next(tmp_path: Path) -> None:
    process = begin(tmp_path / "out")
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert names(tmp_path) == [".out.lock", ".out.partial"]
    with staged(tmp_path / "other"):
        pass
    assert ".out.partial" in names(tmp_path)  # a build of another target leaves it alone
    with staged(tmp_path / "out") as folder:
        assert names(folder) == []
    assert names(tmp_path) == ["other", "out"]


def test_a_second_builder_is_refused_at_the_start(tmp_path: Path) -> None:
    process = begin(tmp_path / "out")
    try:
        with pytest.raises(RequestError, match=f"out: process {process.pid} is writing it; wait") as caught:  # noqa: SIM117
            with staged(tmp_path / "out"):
                raise AssertionError("the body must not run")
        assert "\n" not in str(caught.value) and names(tmp_path / ".out.partial") == ["half"]
    finally:
        process.kill()
        process.wait()


def test_a_second_build_says_so_before_it_works(tiny_teacher: Path, tmp_path: Path) -> None:
    process, heard = begin(tmp_path / "out"), []
    request = BuildRequest(model=tiny_teacher, drafter=None, trees=(("plain", Topology.plain()),), slots=(128,))
    try:
        with pytest.raises(RequestError, match=f"process {process.pid} is writing it"):
            build(request, tmp_path / "out", heard.append)
    finally:
        process.kill()
        process.wait()
    assert heard == []


def test_a_second_builder_may_wait_and_use_what_was_made(tmp_path: Path) -> None:
    out, heard, order = tmp_path / "out", [], []
    begun, go = threading.Event(), threading.Event()

    def first() -> None:
        with staged(out):
            begun.set()
            go.wait()
            order.append("first")

    def tell(line: str) -> None:
        heard.append(line)
        go.set()

    thread = threading.Thread(target=first)
    thread.start()
    begun.wait()
    with exclusive(out, tell=tell):
        order.append("second")
        assert out.is_dir()
    thread.join()
    assert order == ["first", "second"]
    assert heard == [f"{out}: process {os.getpid()} is writing it; waiting until it is done"]
    assert names(tmp_path) == ["out"]


def test_a_folder_may_be_staged_by_whoever_holds_it(tmp_path: Path) -> None:
    with exclusive(tmp_path / "out", wait=False):
        with staged(tmp_path / "out"):
            pass
        assert names(tmp_path) == [".out.lock", "out"]
        with pytest.raises(RequestError, match="exists already"), staged(tmp_path / "out"):
            pass
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize("name", ["", ".", "..", "/"])
def test_a_folder_without_a_name_of_its_own_is_there_already(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RequestError, match="exists already"), staged(Path(name)):
        pass
    assert names(tmp_path) == []


def test_many_at_once_take_turns(tmp_path: Path) -> None:
    """The lock's file is removed by each owner; nobody may hold one that is gone."""
    inside, most, turns = [], [], []

    def turn() -> None:
        for _ in range(20):
            with exclusive(tmp_path / "out"):
                inside.append(1)
                most.append(len(inside))
                inside.pop()
                turns.append(1)

    threads = [threading.Thread(target=turn) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(most) == 1 and len(turns) == 160 and names(tmp_path) == []


@pytest.mark.parametrize("how", ["link", "hard link", "fifo"])
def test_the_lock_overwrites_nothing_of_somebody_else(how: str, tmp_path: Path) -> None:
    victim, lock = tmp_path / "victim", tmp_path / ".out.lock"
    victim.write_text("precious")
    {"link": lock.symlink_to, "hard link": lock.hardlink_to, "fifo": lambda _: os.mkfifo(lock)}[how](victim)
    with pytest.raises(RequestError, match="cannot be written"), staged(tmp_path / "out"):
        pass
    assert victim.read_text() == "precious" and not (tmp_path / "out").exists()
