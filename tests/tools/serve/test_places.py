"""A text's place is given back after any error between its request and its answer; every field of a body is honoured or
gives 400."""

import asyncio
import errno
import os
import random
from typing import Any

import msgspec
import pytest

pytest.importorskip("uvicorn")

from draftwood.errors import BundleError
from draftwood.runtime.engines.opening import Opening
from draftwood.tests.fuzz.bodies import bodies
from draftwood.tools.serve import completions
from draftwood.tools.serve.app import Service, Settings
from draftwood.tools.serve.bodies import MISSING, PASS, ChatBody, CompletionBody, parse
from draftwood.tools.serve.errors import RequestRefused
from draftwood.tools.serve.messages import Ask, Begun, CacheUse, Cancel, Ended, EngineArguments, Piece, Ready, ToEngine
from draftwood.tools.serve.metrics import Metrics, ModelMetrics
from draftwood.tools.serve.model import Mailbox, ServedModel
from draftwood.tools.serve.process import EngineProcess

from .conftest import MESSAGES, TOOLS, WAIT


class Engine:
    """Answers at once; raises at a chosen call."""

    def __init__(self, served: ServedModel, raises: str = "") -> None:
        self.alive, self.ready, self.pid = True, Ready(context=100, calls=None, reasoning=None), 0
        self._served, self.raises = served, raises

    def listen(self, receive: Any, lost: Any) -> None:
        self._receive = receive

    def send(self, message: ToEngine) -> None:
        msgspec.msgpack.encode(message)
        if type(message).__name__ == self.raises:
            raise OSError("planted")
        for answer in (
            (Ended(message.id, "cancelled"),)
            if isinstance(message, Cancel)
            else (Begun(message.id, 1, 0), Piece(id=message.id, text="a", tokens=1), Ended(message.id, "stop"))
        ):
            asyncio.get_running_loop().call_soon(self._receive, answer)


async def asked(raises: str, body: Any, patch: pytest.MonkeyPatch, at: tuple[Any, str] | None = None) -> Any:
    """The error of a request, if a layer below raises one."""
    metrics = Metrics()
    served = ServedModel("m", EngineArguments(bundle="b", opening=Opening(waiting=4)), ModelMetrics(metrics, "m"))
    served._take(Engine(served, raises))  # type: ignore[arg-type]
    service = Service({"m": served}, Settings(per_key=1), metrics)
    error: BaseException | None = None

    async def send(message: Any) -> None:
        if raises == "answering":
            raise OSError("planted")

    async def receive() -> Any:
        await asyncio.Future()  # nothing more comes

    def planted(*_: Any, **__: Any) -> Any:
        raise OSError("planted")

    with patch.context() as planting:
        if at is not None:
            planting.setattr(*at, planted)
        try:
            await service._complete(body, receive, send, {"type": "http", "state": {"headers": {}}, "headers": []})
        except Exception as caught:
            error = caught
    for _ in range(10):
        await asyncio.sleep(0)
    assert (served.busy, served.waiting, len(served._texts)) == (0, 0, 0)
    assert not service._in_flight
    return error


PLACES = [
    (completions.Mailbox, "take"),
    (completions, "tools"),
    (completions, "asks"),
    (completions, "finish_reason"),
    (completions, "_add"),
    (completions.Completion, "_add_text"),
    (ServedModel, "submit"),
    (ServedModel, "_hand"),
    (ModelMetrics, "began"),
    (ModelMetrics, "ended"),
    (ModelMetrics, "drafted"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("place", ["Ask", "answering", *PLACES], ids=str)
def test_whatever_raises_gives_its_place_back(place: Any, stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    body = CompletionBody(prompt="a", n=2, stream=stream)
    raises, at = (place, None) if isinstance(place, str) else ("", place)
    asyncio.run(asyncio.wait_for(asked(raises, body, monkeypatch, at), WAIT))


def test_a_bundle_is_replaced_once_it_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal that comes while the first engine starts leaves one engine, not two."""

    async def replaced() -> None:
        served = ServedModel("m", EngineArguments(bundle="b", opening=Opening()), ModelMetrics(Metrics(), "m"))
        gates: list[asyncio.Future[Any]] = []
        stopped: list[Any] = []

        async def start(arguments: Any) -> Any:
            gates.append(asyncio.get_running_loop().create_future())
            return await gates[-1]

        async def stop(engine: Engine) -> None:
            stopped.append(engine)

        monkeypatch.setattr(EngineProcess, "start", start)
        monkeypatch.setattr(Engine, "stop", stop, raising=False)
        tasks = [asyncio.create_task(served.start()), asyncio.create_task(served.replace())]
        engines = [Engine(served), Engine(served)]
        for number, engine in enumerate(engines):
            while len(gates) <= number:
                await asyncio.sleep(0)
            assert len(gates) == number + 1
            gates[number].set_result(engine)
        await asyncio.gather(*tasks)
        assert served.engine is engines[1] and stopped == engines[:1]

    asyncio.run(asyncio.wait_for(replaced(), WAIT))


def test_a_text_that_waits_in_a_replaced_engine_outlives_it() -> None:
    """That engine may end by a fault of another text while it finishes its own; no other is started for it."""

    class Silent(Engine):
        def send(self, message: ToEngine) -> None:
            pass

    async def replaced() -> list[tuple[int, Any]]:
        served = ServedModel("m", EngineArguments(bundle="b", opening=Opening()), ModelMetrics(Metrics(), "m"))
        old, box = Silent(served), Mailbox()
        served._take(old)  # type: ignore[arg-type]
        served.submit([Ask(id=0, prompt=[1], options={}, policy="plain", steps=False)], box)
        served._take(Engine(served))  # type: ignore[arg-type]
        old.alive = False
        served._lost(old)  # type: ignore[arg-type]
        return await box.take()

    assert isinstance(asyncio.run(asyncio.wait_for(replaced(), WAIT))[0][1], Begun)


def test_the_caches_of_a_replaced_engine_are_not_the_next_ones() -> None:
    served = ServedModel("m", EngineArguments(bundle="b", opening=Opening()), ModelMetrics(Metrics(), "m"))
    old, new = Engine(served), Engine(served)
    served._take(old)  # type: ignore[arg-type]
    served._receive(old, CacheUse(5, 10))  # type: ignore[arg-type]
    assert served.cache_usage == 0.5
    served._take(new)  # type: ignore[arg-type]
    served._receive(old, CacheUse(0, 10))  # type: ignore[arg-type]
    assert served.cache_usage == 0


def test_tools_that_are_refused_count_for_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    body = msgspec.convert({"messages": MESSAGES, "tools": TOOLS}, ChatBody)
    assert isinstance(asyncio.run(asked("", body, monkeypatch)), RequestRefused)


def test_no_body_of_any_content_fails() -> None:
    """The fuzz stage asks ten times as many (`draftwood.tests.fuzz.bodies`)."""
    counts, wrong = asyncio.run(bodies(1000, 1))
    assert wrong == [] and counts[200] > 100 and counts[400] > 100


@pytest.mark.parametrize("kind", [ChatBody, CompletionBody])
def test_a_field_is_known_or_refused_by_its_name(kind: Any) -> None:
    least = {"messages": MESSAGES} if kind is ChatBody else {"prompt": "a"}
    rng = random.Random(1)
    letters = "abcdefghijklmnopqrstuvwxyz_"
    names = [*MISSING, "top_p_", "temprature", "max_token", "mirostat_tau", "ebnf", "json_schema"]
    names += ["".join(rng.choice(letters) for _ in range(rng.randrange(1, 12))) for _ in range(200)]
    for name in names:
        if name in PASS or name in {field.encode_name for field in msgspec.structs.fields(kind)}:
            continue
        with pytest.raises(RequestRefused) as caught:
            parse(msgspec.json.encode(least | {name: "not neutral"}), kind)
        assert caught.value.body.error.param == name
        parse(msgspec.json.encode(least | {name: None}), kind)
    for name in PASS:
        parse(msgspec.json.encode(least | {name: "x"}), kind)
    for name, said in (("temprature", r"; is temperature meant\? if"), ("webhook", "no such field; leave")):
        with pytest.raises(RequestRefused, match=said):
            parse(msgspec.json.encode(least | {name: 0}), kind)


CALL = {"id": "a", "index": 0, "type": "function", "function": {"name": "f", "arguments": "{}", "parsed_arguments": {}}}
# Nested fields: what holds them, the path to them, and whether they pass.
NESTED: list[tuple[dict[str, Any], str | None]] = [
    ({"draftwood": {"polcy": "plain"}}, "draftwood.polcy"),
    ({"stream_options": {"continuous_usage_stats": True}}, "stream_options.continuous_usage_stats"),
    ({"stream_options": {"continuous_usage_stats": False, "include_obfuscation": False}}, None),
    ({"response_format": {"type": "json_object", "schema": {"type": "object"}}}, "response_format.schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"made": {"up": 1}}, "name": "a"}}}, None),
    ({"response_format": {"type": "json_schema", "json_schema": {"schma": {}}}}, "response_format.json_schema.schma"),
    ({"messages": [*MESSAGES, {"role": "assistant", "function_call": {"name": "f"}}]}, "messages[1].function_call"),
    ({"messages": [*MESSAGES, {"role": "assistant", "refusal": "no"}]}, "messages[1].refusal"),
    ({"messages": [*MESSAGES, {"role": "assistant", "audio": {"id": "a"}}]}, "messages[1].audio"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "txt": "b"}]}]}, "messages[0].content[0].txt"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {}}]}]}, None),
    ({"messages": [{"role": "assistant", "reasoning": "a", "refusal": None, "annotations": []}]}, None),
    ({"messages": [{"role": "assistant", "content": "1", "parsed": 1, "tool_calls": [CALL]}]}, None),
    ({"messages": [{"role": "user", "content": "1", "user": "a"}]}, "messages[0].user"),
    ({"messages": [{"role": "assistant", "tool_calls": [CALL | {"made": 1}]}]}, "messages[0].tool_calls[0].made"),
    ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"x": 1}, "strict": True}}]}, None),
    ({"tools": [{"type": "function", "function": {"name": "a", "params": {}}}]}, "tools[0].function.params"),
    ({"tool_choice": {"type": "function", "function": {"name": "a", "made": 1}}}, "tool_choice.function.made"),
    ({"tools": [{"type": "custom", "custom": {"name": "a"}}]}, "tools[0].type"),
    ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "tool_choice.type"),
    ({"response_format": {"type": "grammar", "syntax": "lark"}}, "response_format.type"),
]


@pytest.mark.parametrize(("more", "param"), NESTED, ids=[str(param) for _, param in NESTED])
def test_a_nested_field_is_known_or_refused_by_its_path(more: dict[str, Any], param: str | None) -> None:
    content = msgspec.json.encode({"messages": MESSAGES} | more)
    if param is None:
        parse(content, ChatBody)
        return
    with pytest.raises(RequestRefused) as caught:
        parse(content, ChatBody)
    assert caught.value.body.error.param == param


def test_a_machine_without_room_for_a_process_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    async def full(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(asyncio, "create_subprocess_exec", full)
    with pytest.raises(BundleError, match="b: no process can be started for its engine: Resource temporarily"):
        asyncio.run(EngineProcess.start(EngineArguments(bundle="b", opening=Opening())))
