"""Texts that share an engine: nobody waits long, no room is lost, and every text is its own, counted and not timed."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from draftwood.errors import BusyError, RequestError
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.caches import Caches, Wanted
from draftwood.runtime.decoding import Result
from draftwood.runtime.engines.bitwise import BitwiseEngine
from draftwood.runtime.engines.cpu import CpuEngine
from draftwood.runtime.engines.opening import Opening
from draftwood.runtime.opened import OpenedBundle
from draftwood.runtime.sharing import Figures, Sharing, _Ticket
from draftwood.runtime.speculation import drafting
from draftwood.runtime.speculation.sampling import Sampling

SECONDS = 300.0
Schedule = tuple[int, int, float, int | None]


class Counting(CpuEngine):
    """Reads prompts of eight tokens a launch, and writes down each launch: the texts of a step, or a prompt's one."""

    prefill_rows = 8

    def __init__(self, bundle: Bundle) -> None:
        super().__init__(bundle, Opening(threads=1))
        self.launches: list[tuple[str, list[int]]] = []
        self.before: Callable[[], None] = lambda: None

    def append(self, state, chunk_n):  # type: ignore[no-untyped-def]
        self.launches.append(("prompt", [id(state)]))
        self.before()
        return super().append(state, chunk_n)

    def step(self, states, gears):  # type: ignore[no-untyped-def]
        self.launches.append(("step", [id(state) for state in states]))
        self.before()
        return super().step(states, gears)


@pytest.fixture
def engine(tiny_bundle: Path) -> Counting:
    return Counting(Bundle.open(tiny_bundle))


def opened(engine: CpuEngine, **options: Any) -> OpenedBundle:
    return OpenedBundle(engine.bundle, engine, Opening(**options))


def ids(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(2, 300, count).tolist()


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < end
        time.sleep(0.001)


def free(model: OpenedBundle) -> bool:
    figures = model.figures()
    return (figures.running, figures.waiting, figures.running_bytes) == (0, 0, 0)


@pytest.mark.parametrize("others", [1, 4, 7])
def test_a_long_prompt_holds_a_text_up_by_one_launch_of_it(engine: Counting, others: int) -> None:
    """A prompt of 200 tokens is read in 25 launches, next to running texts. Between two steps of each text there are at
    most one launch of the prompt, and the steps of the others, as many a launch as there are places."""
    model = opened(engine)
    streams = [model.stream(ids(n, 5), max_new_tokens=200, ignore_eos=True, policy="plain") for n in range(others)]
    begun = [threading.Event() for _ in streams]

    def run(stream, runs: threading.Event) -> None:  # type: ignore[no-untyped-def]
        for n, _ in enumerate(stream):
            if n == 7:
                runs.set()

    def all_wait() -> None:
        """Until everyone who is here stands in a queue: delays of a busy machine are no part of the bound."""
        sharing, end = model._sharing, time.monotonic() + 30
        while time.monotonic() < end:
            with sharing._lock:
                held = sum(p.ticket is not None for p in sharing._places.values())
                if held == len(sharing._places):
                    return
            time.sleep(0.0005)

    engine.before = all_wait
    with ThreadPoolExecutor(others + 1) as threads:
        running = [threads.submit(run, *one) for one in zip(streams, begun, strict=True)]
        # All of them: a thread that starts late would read its own prompt next to the long one.
        assert all(runs.wait(SECONDS) for runs in begun)
        threads.submit(model.generate, ids(99, 200), max_new_tokens=1).result(SECONDS)
        long = [n for n, (kind, _) in enumerate(engine.launches) if kind == "prompt"][-25:]
        for stream in streams:
            stream.cancel()
        for one in running:
            one.result(SECONDS)
    first, last = long[0], long[-1]
    groups = -(-others // engine.max_batch)
    assert len({engine.launches[n][1][0] for n in long}) == 1, "one prompt"
    # Nor do running texts hold it up: one launch of steps between two of the prompt.
    assert [after - before for before, after in pairwise(long)] == [2] * 24
    for number in {one for kind, group in engine.launches[first:last] if kind == "step" for one in group}:
        own = [n for n in range(first, last) if number in engine.launches[n][1]]
        for before, after in pairwise(own):
            between = [kind for kind, _ in engine.launches[before + 1 : after]]
            # Groups may overlap if there are more places than a launch has.
            assert between.count("prompt") <= groups and between.count("step") <= 2 * groups - 1, between
    assert free(model)


def test_prompts_take_turns(engine: Counting) -> None:
    """A short prompt that comes while a long one is read is read after one launch of it."""
    model, begun = opened(engine), threading.Event()

    def begins() -> None:
        if len(engine.launches) == 2:
            begun.set()
            until(lambda: len(model._sharing._queues.prompts) == 1)

    engine.before = begins
    with ThreadPoolExecutor(2) as threads:
        long = threads.submit(model.generate, ids(0, 100), max_new_tokens=1)
        assert begun.wait(SECONDS)
        threads.submit(model.generate, ids(1, 8), max_new_tokens=1).result(SECONDS)
        long.result(SECONDS)
    kinds = [group[0] for _, group in engine.launches]
    short = next(n for n, one in enumerate(kinds) if one != kinds[0])
    assert short <= 3 and len(kinds) == 14


def test_no_text_waits_for_more_than_its_turn(engine: Counting) -> None:
    """Nine texts on four places: while all run, each is in one of any five launches."""
    model = opened(engine)
    streams = [iter(model.stream(ids(n, 5), max_new_tokens=60, ignore_eos=True, policy="plain")) for n in range(9)]
    for stream in streams:
        next(stream), next(stream)
    engine.launches.clear()
    engine.before = lambda: until(lambda: all(p.ticket for p in model._sharing._places.values()) or len(streams) < 9)
    with ThreadPoolExecutor(9) as threads:
        list(threads.map(list, streams))
    whole = engine.launches[: 59 * 9 // 4 - 20]
    for text in {one for _, group in whole for one in group}:
        own = [n for n, (_, group) in enumerate(whole) if text in group]
        assert max(b - a for a, b in pairwise(own)) <= 3
    assert free(model)


@pytest.mark.parametrize("launch", [1, 3, 14, 16, 20])
def test_cancelling_frees_the_place_within_a_launch(engine: Counting, launch: int) -> None:
    """In a prompt of thirteen launches and after it."""
    model = opened(engine)
    stream = model.stream(ids(0, 100), max_new_tokens=100, ignore_eos=True)

    def count() -> None:
        if len(engine.launches) == launch:
            stream.cancel()

    engine.before = count
    result = stream.run()
    assert result.finish_reason == "cancelled" and len(engine.launches) == launch
    assert free(model)
    stream.cancel()  # again does nothing


class Interrupting(deque):  # type: ignore[type-arg]
    """A queue; an interrupt comes when somebody has just left it."""

    def popleft(self) -> Any:
        super().popleft()
        raise KeyboardInterrupt


@pytest.mark.parametrize("queue", ["prompts", "steps"])
def test_an_interrupt_while_a_launch_is_gathered_loses_nobody(engine: Counting, queue: str) -> None:
    model = opened(engine)
    honest = getattr(model._sharing._queues, queue)
    setattr(model._sharing._queues, queue, Interrupting())
    with pytest.raises(KeyboardInterrupt):
        model.generate(ids(0, 20), max_new_tokens=20, ignore_eos=True)
    assert free(model)
    setattr(model._sharing._queues, queue, honest)
    assert len(model.generate(ids(1, 20), max_new_tokens=20, ignore_eos=True).token_ids) == 20 and free(model)


@pytest.mark.parametrize("reads", [True, False])
def test_an_interrupt_ends_every_text_of_its_launch(engine: Counting, reads: bool) -> None:
    """They may be left halfway, those of other threads, too."""
    texts = [opened(engine).stream(ids(number, 9)) for number in range(1 if reads else 2)]
    for text in texts:
        text.start()
        text.state = engine.begin(128) if reads else text.state
    tickets = [_Ticket(text, threading.Condition(), text.read() if reads else None) for text in texts]

    def interrupt() -> None:
        raise KeyboardInterrupt

    engine.before = interrupt
    with pytest.raises(KeyboardInterrupt):
        Sharing(engine, Caches(engine))._run(tickets)
    assert all("was interrupted; ask for it again" in str(ticket.error) for ticket in tickets)


def test_closing_and_forgetting_free_the_place(engine: Counting) -> None:
    model = opened(engine)
    closed, forgotten = (iter(model.stream(ids(n, 20), ignore_eos=True)) for n in range(2))
    assert [next(closed), next(forgotten)] == ["", ""] and model.figures().running == 2
    next(closed), next(forgotten)
    closed.close()
    assert model.figures().running == 1
    del forgotten
    assert free(model) and model.figures().kept_bytes > 0


def one_text(engine: CpuEngine) -> int:
    """Bytes of a text at the bundle's smaller KV length."""
    return engine.begin(128).bytes


def test_a_text_without_room_waits_and_one_that_never_fits_is_refused(engine: Counting) -> None:
    model = opened(engine, cache_bytes=one_text(engine))
    plain = model.generate(ids(1, 9), max_new_tokens=9, policy="plain").token_ids
    with pytest.raises(RequestError, match=r"caches for 200 tokens take \d+ bytes; expected at most the budget of"):
        model.generate(ids(0, 100), max_new_tokens=100)
    first = iter(model.stream(ids(0, 9), max_new_tokens=9, ignore_eos=True))
    next(first)
    with ThreadPoolExecutor(2) as threads:
        second = threads.submit(model.generate, ids(1, 9), max_new_tokens=9)
        until(lambda: model.figures().waiting == 1)
        third = model.stream(ids(2, 9), max_new_tokens=9)
        cancelled = threads.submit(third.run)
        until(lambda: model.figures().waiting == 2)
        third.cancel()
        assert cancelled.result(SECONDS).finish_reason == "cancelled"
        assert model.figures().running == 1 and not second.done()
        list(first)
        assert second.result(SECONDS).token_ids == plain
    assert free(model)


def test_who_comes_when_as_many_as_may_wait_do_is_refused(engine: Counting) -> None:
    model = opened(engine, cache_bytes=one_text(engine), waiting=1)
    with ThreadPoolExecutor(2) as threads:
        first = iter(model.stream(ids(0, 9), ignore_eos=True, max_new_tokens=9))
        next(first)
        second = threads.submit(model.generate, ids(1, 9), max_new_tokens=9)
        until(lambda: model.figures().waiting == 1)
        with pytest.raises(BusyError, match="1 texts wait already"):
            model.generate(ids(2, 9), max_new_tokens=9)
        assert (model.figures().running, model.figures().waiting) == (1, 1)
        list(first)
        second.result(SECONDS)
    assert free(model)
    nobody = opened(engine, cache_bytes=one_text(engine), waiting=0)
    assert nobody.generate(ids(1, 9), max_new_tokens=9).token_ids == second.result().token_ids
    assert free(nobody)


@contextmanager
def one_waits(engine: Counting) -> Iterator[tuple[OpenedBundle, Iterator[str], Future[Result]]]:
    """A bundle with room for one text, the text that has it, and another, which waits for it in a thread."""
    model = opened(engine, cache_bytes=one_text(engine))
    first = iter(model.stream(ids(0, 9), ignore_eos=True, max_new_tokens=9))
    next(first)
    with ThreadPoolExecutor(1) as threads:
        second = threads.submit(model.generate, ids(1, 9), max_new_tokens=9)
        until(lambda: model.figures().waiting == 1)
        yield model, first, second


def test_a_stream_is_closed_while_a_policy_learns(engine: Counting) -> None:
    """As the garbage collector may do. The text that waits for the room has asked its policy before."""
    with one_waits(engine) as (model, first, second), ThreadPoolExecutor(1) as threads:
        learned = model._policies_of("adaptive").new(True, 9).learned  # type: ignore[union-attr]
        with learned.lock:
            threads.submit(first.close).result(SECONDS / 10)  # type: ignore[attr-defined]
        assert len(second.result(SECONDS).token_ids) == 9
    assert free(model)


def test_a_stream_that_is_kept_for_its_result_keeps_no_caches(engine: Counting) -> None:
    model, states, begin = opened(engine, prefixes=False), list[weakref.ref[Any]](), engine.begin

    def begun(*given: Any) -> Any:
        state = begin(*given)
        states.append(weakref.ref(state))
        return state

    engine.begin = begun  # type: ignore[method-assign]
    streams = [model.stream(ids(n, 9), max_new_tokens=9) for n in range(3)]
    texts = [stream.run().token_ids for stream in streams]
    gc.collect()
    assert len(states) >= 3 and all(state() is None for state in states)
    assert [stream.result.token_ids for stream in streams if stream.result] == texts


def test_a_kept_text_lets_its_grammar_go(engine: Counting) -> None:
    """A grammar holds a socket, and texts are kept as long as there is room."""
    caches, prompt = Caches(engine), ids(0, 40)
    state = caches.admit(Wanted(prompt, 60, 128, Sampling()))
    assert state is not None
    engine.start(state, np.array(prompt))
    state.constraint = state.guide = state.adjustment = object()  # type: ignore[assignment]
    caches.leave(state, keep=True)
    assert caches.kept_bytes and state.constraint is state.guide is state.adjustment is None


def test_a_text_that_cannot_be_admitted_fails_in_its_own_thread(
    engine: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text that made room for it had got its error, and this one waited for ever."""
    with one_waits(engine) as (model, first, second):
        monkeypatch.setattr(engine, "begin", lambda *_: [].__getitem__(0))
        list(first)
        with pytest.raises(IndexError):
            second.result(SECONDS)
    assert free(model) and model.figures().prompts == 1
    monkeypatch.undo()
    assert len(model.generate(ids(1, 9), max_new_tokens=9, ignore_eos=True).token_ids) == 9 and free(model)


def test_a_text_that_was_cancelled_or_closed_on_its_way_does_not_wait(engine: Counting) -> None:
    """Nobody would wake it: its stream was made before, and room may never come."""
    model = opened(engine, cache_bytes=one_text(engine))
    held = iter(model.stream(ids(0, 9), ignore_eos=True, max_new_tokens=9))
    next(held)
    cancelled, late = (model.stream(ids(n, 9), max_new_tokens=9) for n in (1, 2))
    wanted = cancelled.wanted
    cancelled.wanted = lambda: (cancelled.cancel(), wanted())[1]  # type: ignore[method-assign]
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(cancelled.run).result(SECONDS).finish_reason == "cancelled"
        model.close()
        with pytest.raises(RequestError, match="is closed; open it again"):
            threads.submit(late.run).result(SECONDS)


def test_closing_the_bundle_refuses_those_that_wait_for_room(engine: Counting) -> None:
    with one_waits(engine) as (model, _, second):
        third = model.stream(ids(2, 9), max_new_tokens=9)
        model.close()
        with pytest.raises(RequestError, match="is closed; open it again"):
            second.result(SECONDS)
        with pytest.raises(RequestError, match="is closed; open it again"):
            third.run()
    assert model.figures().waiting == 0


def test_a_text_never_has_more_than_was_reserved(tiny_bundles: dict[str, Path]) -> None:
    for folder in tiny_bundles.values():
        engine = CpuEngine(Bundle.open(folder), Opening(threads=1))
        model = opened(engine, prefixes=False)
        for policy in ("adaptive", *(gear.name for gear in engine.bundle.manifest.gears)):
            for length in (1, 60, 100):
                stream = model.stream(ids(length, length), max_new_tokens=27, ignore_eos=True, policy=policy)
                for _ in stream:
                    assert stream.result or stream.finished or stream.state.bytes <= model.figures().running_bytes
        assert free(model)


def test_room_is_kept_for_drafts_that_need_a_larger_kv_length(tiny_bundle: Path) -> None:
    """A plan may have trees at the larger one alone: a text that begins with a plain step grows to it."""
    whole = Bundle.open(tiny_bundle)
    gears = tuple(gear for gear in whole.manifest.gears if gear.tree == "plain" or gear.slots == 256)
    bundle = dataclasses.replace(whole, manifest=replace(whole.manifest, gears=gears))
    model = opened(CpuEngine(bundle, Opening(threads=1)), prefixes=False)
    stream = model.stream(ids(1, 30), max_new_tokens=60, ignore_eos=True)
    for _ in stream:
        assert stream.finished or stream.state.bytes <= model.figures().running_bytes
    assert free(model)


def answered(model: OpenedBundle, prompt: list[int], **options: Any) -> Any:
    return model.generate(prompt, **{"max_new_tokens": 20, "ignore_eos": True} | options)


@pytest.fixture(params=["medusa", "eagle3", "fasteagle"])
def folder(request: pytest.FixtureRequest, tiny_bundles: dict[str, Path]) -> Path:
    return tiny_bundles[request.param]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_second_turn_reads_only_what_is_new(folder: Path, temperature: float) -> None:
    engine = Counting(Bundle.open(folder))
    model, fresh = opened(engine), opened(engine, prefixes=False)
    options: dict[str, Any] = {"temperature": temperature, "seed": 3}
    prompt = ids(5, 40)
    for turn in range(3):
        want = answered(fresh, prompt, policy="plain", **options)
        engine.launches.clear()
        got = answered(model, prompt, **options)
        assert got.token_ids == want.token_ids and want.prefix_tokens == 0
        if turn:
            # All but the last token, the root, and those that a step took beyond the answer's end.
            assert got.prefix_tokens >= len(prompt) - 6 - 2
            assert sum(kind == "prompt" for kind, _ in engine.launches) == 1
        prompt = [*prompt, *got.token_ids, *ids(turn, 5)]
    assert free(model) and free(fresh)


def test_the_same_prompt_again_reads_one_token(folder: Path) -> None:
    model = opened(CpuEngine(Bundle.open(folder), Opening(threads=1)))
    first, second = (answered(model, ids(6, 50)) for _ in range(2))
    assert first.token_ids == second.token_ids and second.prefix_tokens == 49


def test_who_shares_a_part_copies_it(folder: Path) -> None:
    """Two chats after one beginning: neither loses its own, and drafts are as good as without."""
    engine = CpuEngine(Bundle.open(folder), Opening(threads=1))
    model, fresh = opened(engine), opened(engine, prefixes=False)
    system, policy = ids(7, 30), engine.bundle.manifest.gears[-1].name
    prompts = [[*system, *ids(n, 40)] for n in (1, 2)]
    want = [answered(fresh, prompt, policy=policy) for prompt in prompts]
    got = [answered(model, prompt, policy=policy) for prompt in prompts]
    assert [one.prefix_tokens for one in got] == [0, 29]
    assert [(one.token_ids, one.steps) for one in got] == [(one.token_ids, one.steps) for one in want]
    again = answered(model, [*prompts[0], *got[0].token_ids, 7], policy=policy)
    assert again.prefix_tokens >= 60
    assert again.token_ids == answered(fresh, [*prompts[0], *got[0].token_ids, 7], policy="plain").token_ids


def test_the_least_recently_used_goes_first(engine: Counting) -> None:
    model = opened(engine, cache_bytes=3 * one_text(engine))
    for seed in (1, 2, 3):
        answered(model, ids(seed, 40))
    assert answered(model, ids(1, 40)).prefix_tokens == 39  # used again
    answered(model, ids(4, 40))
    figures = model.figures()
    assert figures.kept_bytes <= figures.budget_bytes and (figures.prompts, figures.prefix_hits) == (5, 1)
    kept = [one.tokens_n[:40].tolist() for one in model._sharing._caches._kept]
    assert kept == [ids(seed, 40) for seed in (3, 1, 4)]


def test_bitwise_starts_behind_a_prefix_with_the_same_bits(tiny_bundle: Path) -> None:
    """Of every length of the shared part, taken and copied."""
    engine = BitwiseEngine(Bundle.open(tiny_bundle), Opening(threads=1))
    text, rest = ids(3, 150), ids(4, 20)
    for length in (16, 31, 32, 33, 64, 100, 149):
        found = []
        for way in ("fresh", "taken", "copied"):
            state = engine.begin(256)
            if way != "fresh":
                engine.prefill(state, np.array(text))
                state = state.copied(length, 256) if way == "copied" else state
                state.rewind(length)
            else:
                engine.prefill(state, np.array(text[:length]))
            found.append(engine.prefill(state, np.array(rest)).logits_RV.copy().view(np.int32))
        assert np.array_equal(found[0], found[1]) and np.array_equal(found[0], found[2])
    model = opened(engine)
    first = answered(model, text)
    assert answered(model, text).token_ids == first.token_ids and model.figures().prefix_hits == 1


def test_a_step_that_fails_has_committed_nothing(
    tiny_draft_bundles: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its texts take it again, one by one: tokens that it had committed would be lost."""
    engine = CpuEngine(Bundle.open(tiny_draft_bundles["fasteagle"]), Opening(threads=1))
    monkeypatch.setattr(drafting, "MOST_WAITING", 4)
    states = [engine.begin(128) for _ in range(2)]
    for state in states:
        engine.start(state, np.array(ids(1, 3)))
    monkeypatch.setattr(engine.drafting, "_extend", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        for length in range(3, 20):
            assert [state.length for state in states] == [length, length]
            engine.step(states, [engine.bundle.gear("plain-kv128")] * 2)
    assert [state.length for state in states] == [length, length]


def schedules(count: int, seed: int) -> Iterator[Schedule]:
    """Prompt's number, new tokens, temperature, and after how many pieces it is given up, if it is."""
    rng = random.Random(seed)
    for _ in range(count):
        yield rng.randrange(8), rng.randrange(1, 16), rng.choice([0.0, 0.9]), rng.choice([None, None, 0, 1, 4])


def run_schedules(model: OpenedBundle, wanted: dict[tuple[int, float], tuple[int, ...]], count: int, seed: int) -> None:
    """Half in threads, half on asyncio; who is not given up is the plain text."""
    prompts = [[*ids(0, 20)[: 5 * (n % 5)], *ids(n, 4 + 6 * n)] for n in range(8)]

    def wants(one: Schedule) -> dict[str, Any]:
        number, tokens, temperature, _ = one
        return {
            "prompt": prompts[number],
            "max_new_tokens": tokens,
            "temperature": temperature,
            "seed": number,
            "ignore_eos": True,
        }

    for number in range(8):
        for temperature in (0.0, 0.9):
            if (number, temperature) not in wanted:
                asked = wants((number, 16, temperature, None))
                wanted[number, temperature] = (
                    opened(model.engine, prefixes=False)
                    .generate(  # type: ignore[arg-type]
                        policy="plain", **asked
                    )
                    .token_ids
                )

    def check(one: Schedule, tokens: tuple[int, ...]) -> None:
        assert tokens == wanted[one[0], one[2]][: len(tokens)]
        assert one[3] is not None or len(tokens) == one[1]

    def threaded(one: Schedule) -> None:
        stream = model.stream(**wants(one))
        for number, _ in enumerate(stream):
            if number == one[3]:
                stream.cancel()
        check(one, tuple(stream.tokens))

    async def asynchronous(one: Schedule) -> None:
        if one[3] is None:
            check(one, (await model.agenerate(**wants(one))).token_ids)
            return
        task = asyncio.create_task(model.agenerate(**wants(one)))
        await asyncio.sleep(0.002 * one[3])
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def all_of(own: list[Schedule]) -> None:
        places = asyncio.Semaphore(6)

        async def placed(one: Schedule) -> None:
            async with places:
                await asynchronous(one)

        await asyncio.gather(*map(placed, own))

    drawn = list(schedules(count, seed))
    with ThreadPoolExecutor(7) as threads:
        loop = threads.submit(asyncio.run, all_of(drawn[1::2]))
        list(threads.map(threaded, drawn[::2]))
        loop.result()
    until(lambda: free(model))
    figures = model.figures()
    assert figures.kept_bytes <= figures.budget_bytes
    model._sharing._caches.clear()
    assert model.figures() == Figures(
        0, 0, 0, 0, figures.budget_bytes, figures.prompts, figures.prefix_hits, figures.prefix_tokens
    )


@pytest.mark.parametrize("texts", [3, 20])
def test_random_schedules_leave_nothing_behind(folder: Path, texts: int) -> None:
    """Threads and asyncio, given up at any time, on a budget that makes some wait."""
    engine = CpuEngine(Bundle.open(folder), Opening(threads=1))
    run_schedules(opened(engine, cache_bytes=texts * engine.begin(256).bytes * 2), {}, 60, texts)


@pytest.mark.slow
def test_ten_thousand_schedules(folder: Path) -> None:
    engine, wanted = CpuEngine(Bundle.open(folder), Opening(threads=1)), dict[tuple[int, float], tuple[int, ...]]()
    for seed in range(100):
        model = opened(engine, cache_bytes=random.Random(seed).randrange(3, 20) * engine.begin(256).bytes * 2)
        run_schedules(model, wanted, 100, seed)
