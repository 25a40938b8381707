"""Who asked first is next; nobody who gives up is waited for."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from draftwood.runtime.bundle import Bundle
from draftwood.runtime.engines.cpu import CpuEngine
from draftwood.runtime.engines.opening import Opening
from draftwood.runtime.engines.turns import Turns
from draftwood.runtime.speculation.sequence import SequenceState
from draftwood.runtime.speculation.step import TeacherOutput

SECONDS = 300.0


def wait_for(turns: Turns, count: int) -> None:
    """Until that many threads wait."""
    until = time.monotonic() + SECONDS
    while len(turns._waiting) < count:
        assert time.monotonic() < until
        time.sleep(0.001)


def test_turns_come_in_the_order_they_were_asked_for() -> None:
    turns, order = Turns(), []

    def take(number: int) -> None:
        with turns:
            order.append(number)

    threads = []
    with turns:
        for number in range(6):
            threads.append(threading.Thread(target=take, args=(number,)))
            threads[-1].start()
            wait_for(turns, number + 1)
    # Whoever asks again is after all of them.
    take(6)
    for thread in threads:
        thread.join(SECONDS)
    assert order == list(range(7))


def test_one_thread_at_a_time() -> None:
    turns, inside, most = Turns(), 0, 0

    def work() -> None:
        nonlocal inside, most
        for _ in range(300):
            with turns:
                inside += 1
                most = max(most, inside)
                time.sleep(0)
                inside -= 1

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert not any(thread.is_alive() for thread in threads) and most == 1


def test_an_error_inside_passes_the_turn_on() -> None:
    turns = Turns()
    with pytest.raises(ZeroDivisionError), turns:
        1 / 0  # noqa: B018
    with turns:
        pass


# In its own process: earlier tests may have left threads and signals as they please.
INTERRUPTED = """
import signal, threading, time
from draftwood.runtime.engines.turns import Turns

class Interrupted(Exception):
    pass

def interrupt(*_):
    raise Interrupted

def hold():
    with turns:
        holds.set()
        leave.wait()

def interrupt_who_waits():
    while not turns._waiting:
        time.sleep(0.01)
    time.sleep(0.05)
    signal.pthread_kill(threading.main_thread().ident, signal.SIGALRM)

turns, holds, leave = Turns(), threading.Event(), threading.Event()
signal.signal(signal.SIGALRM, interrupt)
holder = threading.Thread(target=hold)
holder.start()
holds.wait()
threading.Thread(target=interrupt_who_waits).start()
try:
    with turns:
        print("has a turn that is another's")
except Interrupted:
    print("interrupted", len(turns._waiting))
leave.set()
holder.join()
with turns:
    print("next")
"""


def test_who_is_interrupted_while_waiting_stands_back() -> None:
    found = subprocess.run([sys.executable, "-P", "-c", INTERRUPTED], capture_output=True, text=True, timeout=SECONDS)
    assert (found.stdout.split("\n"), found.stderr) == (["interrupted 0", "next", ""], "")


class Chunked(CpuEngine):
    """Reads prompts of four tokens a launch, and tells which text each launch is of."""

    prefill_rows = 4

    def __init__(self, bundle: Bundle) -> None:
        super().__init__(bundle, Opening(threads=1))
        self.launches: list[int] = []
        self.between = lambda: None

    def append(self, state: SequenceState, chunk_n: np.ndarray) -> TeacherOutput:
        self.launches.append(id(state))
        self.between()
        return super().append(state, chunk_n)


def test_another_text_goes_on_between_the_launches_of_a_prompt(
    tiny_bundle: Path, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Chunked(Bundle.open(tiny_bundle))
    long, short = engine.begin(128), engine.begin(128)
    plain = engine.begin(128)
    want = engine.start(plain, np.array(prompt[:12])).tokens
    engine.launches.clear()
    other = threading.Thread(target=lambda: engine.start(short, np.array(prompt[:4])))
    clock = [0]
    monkeypatch.setattr(time, "perf_counter_ns", lambda: clock[0])

    def passes() -> None:
        """A microsecond for a launch of the long prompt, a second for the other text's."""
        clock[0] += 1000 if engine.launches[-1] == id(long) else 10**9

    def begins() -> None:
        engine.between = passes
        passes()
        other.start()
        wait_for(engine._turns, 1)

    engine.between = begins
    got = engine.start(long, np.array(prompt[:12]))
    other.join(SECONDS)
    assert engine.launches == [id(long), id(short), id(long), id(long)]
    assert got.tokens == want, "the other text's launch wrote over this one's outputs"
    assert got.verify_us == 3.0, "what the other text took is no part of this one's"
