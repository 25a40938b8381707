"""The engine's process of a server, looked at from inside."""

import dataclasses
import itertools
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import draftwood
from draftwood.runtime.engines import cpu
from draftwood.runtime.engines.cpu import CpuEngine
from draftwood.runtime.engines.sessions import session
from draftwood.runtime.speculation.logprobs import TokenLogprobs
from draftwood.runtime.text.tokenizer import Tokenizer
from draftwood.tests.bpe import SPECIAL, train_tokenizer
from draftwood.tools.serve import messages
from draftwood.tools.serve.messages import Ask, CacheUse, Refused
from draftwood.tools.serve.worker import Worker, _refusal, open_rest, warm

TOO_LONG = "context_length_exceeded"


def test_warming_up_teaches_the_policy_nothing(tiny_bundle: Path) -> None:
    with draftwood.open(tiny_bundle, threads=1) as model:
        warm(model)
        bank = model.stream("the cat sat", max_new_tokens=1).policy.learned.bank  # type: ignore[attr-defined]
        assert bank.plain_us == bank.saved_us == 0


def test_graphs_of_several_texts_are_opened_beside_the_first_texts(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with draftwood.open(tiny_bundle, threads=1) as model:
        engine, single = model.engine, {"step", "grouped"}
        assert isinstance(engine, CpuEngine) and engine.batches and set(engine._opened) == single
        answered = threading.Event()

        def opened_late(*given: Any) -> Any:
            assert answered.wait(300), "an answer waited for a graph that it does not need"
            return session(*given)

        monkeypatch.setattr(cpu, "session", opened_late)
        with ThreadPoolExecutor(1) as beside:
            opening = beside.submit(open_rest, model)
            assert model.generate("the cat sat", max_new_tokens=8).steps  # meanwhile
            answered.set()
            opening.result()
        assert set(engine._opened) == single | {f"grouped-b{texts}" for texts in engine.batches}
        opened = dict(engine._opened)
        with ThreadPoolExecutor(engine.max_batch) as threads:
            list(threads.map(lambda seed: model.generate("the cat", seed=seed, max_new_tokens=8), range(8)))
        assert engine._opened == opened


def test_a_padded_engine_is_ready_with_a_step_of_every_number_of_texts(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with draftwood.open(tiny_bundle, threads=1, engine="static") as model:
        stepped, step = set[tuple[int, str]](), model.engine.step
        monkeypatch.setattr(
            model.engine,
            "step",
            lambda states, gears: (stepped.add((len(states), gears[0].name)), step(states, gears))[1],
        )
        warm(model)
        names = {gear.name for gear in model.manifest.gears}
        assert stepped >= {(texts, name) for texts in model.engine.batches for name in names}


def test_figures_of_the_caches_arrive_in_the_order_in_which_they_were_taken(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a server without sequences may go on reporting the memory of its last ones."""
    sequences = 100
    with draftwood.open(tiny_bundle, threads=1) as model:
        taken, figures = itertools.count(), model.figures()

        def taken_slowly() -> Any:
            number = next(taken)
            time.sleep(0.002 * (number % 2))  # every second one would be overtaken
            return dataclasses.replace(figures, running_bytes=number)

        monkeypatch.setattr(model, "figures", taken_slowly)
        ours, theirs = socket.socketpair()
        with ours, theirs, ours.makefile("rb") as answers, theirs.makefile("rb") as asks, ThreadPoolExecutor(1) as run:
            running = run.submit(Worker(model, theirs).run, asks)
            too_long = [0] * (model.manifest.dims.context + 1)
            for number in range(sequences):
                ask = Ask(id=number, prompt=too_long, options={}, policy="adaptive", steps=False)
                ours.sendall(messages.framed(ask))
            received = list[Any]()
            while sum(isinstance(message, Refused) for message in received) < sequences:
                size = int.from_bytes(answers.read(messages.HEAD_BYTES), "big")
                received.append(messages.decode_for_server(answers.read(size)))
            ours.shutdown(socket.SHUT_WR)
            running.result()
        assert [use.running_bytes for use in received if isinstance(use, CacheUse)] == list(range(sequences))


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("the prompt has 300 tokens, but the model's context is 255 with the answer; shorten it", TOO_LONG),
        ("prompt: 300 tokens, but the bundle's context is 255 with the answer; shorten it or", TOO_LONG),
        ("chat: the template refuses the messages: say first what the context is", None),
    ],
)
def test_a_template_that_speaks_of_a_context_does_not_say_that_it_is_full(message: str, code: str | None) -> None:
    refused = _refusal(1, message)
    assert (refused.param, refused.code) == ("messages", code)


def test_special_tokens_have_names_and_no_bytes(tmp_path: Path) -> None:
    """Two of them were one entry, of no name, among a place's likeliest tokens."""
    train_tokenizer([], 261).save(str(tmp_path / "tokenizer.json"))
    worker = Worker.__new__(Worker)
    worker._model = SimpleNamespace(bundle=SimpleNamespace(tokenizer=Tokenizer.load(tmp_path)))  # type: ignore[assignment]
    drawn = worker._drawn(1, TokenLogprobs(-1.0, ((0, -0.5), (1, -1.0))))
    assert (drawn.token, drawn.bytes) == (SPECIAL[1], [])
    assert [(top.token, top.bytes) for top in drawn.top_logprobs] == [(SPECIAL[0], []), (SPECIAL[1], [])]
