"""``python -m draftwood.tests.fuzz.bodies``: bodies of requests as nobody should send them, through the whole server.

Every body is a valid one, changed at some places. Changes are other values of JSON, numbers up to 10^400, depth,
repeated keys, names of Python's own attributes, and bytes that are no JSON. The engine is a stand-in that takes what it
is sent apart as a real one does. Right is any answer but 5xx, in one line if it is an error. Random schemas and
patterns then go to the processes that compile grammars. Each is refused in one line or says what may come, and the next
one finds the processes well.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

from draftwood.runtime.engines.opening import Opening
from draftwood.runtime.reasoning import ReasoningForm
from draftwood.tools.serve import messages
from draftwood.tools.serve.app import Service, Settings
from draftwood.tools.serve.messages import Ask, Begun, Cancel, Encoded, Ended, EngineArguments, Piece, Ready, ToEngine
from draftwood.tools.serve.metrics import Metrics, ModelMetrics
from draftwood.tools.serve.model import ServedModel

_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}}
_COMMON: dict[str, Any] = {
    "model": "m", "temperature": 0.5, "top_p": 0.9, "top_k": 3, "seed": 1, "stop": ["a"], "n": 2, "stream": False,
    "stream_options": {"include_usage": True}, "ignore_eos": False, "user": "u", "metadata": {"a": 1},
    "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"const": 1}}},
    "logit_bias": {"3": 1.5}, "allowed_token_ids": [1, 2], "bad_words": ["a"], "min_tokens": 1, "max_tokens": 5,
    "stop_token_ids": [3], "min_p": 0.1, "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1,
    "include_stop_str_in_output": True, "draftwood": {"policy": "plain", "steps": False},
}  # fmt: skip
_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
_MESSAGES = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": [{"type": "text", "text": "b"}], "tool_calls": [_CALL]},
    {"role": "tool", "content": "c", "tool_call_id": "c"},
]
SEEDS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": _COMMON | {
        "messages": _MESSAGES, "logprobs": True, "top_logprobs": 2, "chat_template_kwargs": {"a": 1}, "tools": [_TOOL],
        "tool_choice": {"type": "function", "function": {"name": "f"}}, "parallel_tool_calls": False,
        "continue_final_message": False, "add_generation_prompt": True, "max_completion_tokens": 5,
    },
    "/v1/completions": _COMMON | {
        "prompt": ["a", "b"], "logprobs": 2, "regex": "a+", "structured_outputs": {"choice": ["a"]},
    },
    "/tokenize": {"model": "m", "prompt": "a", "add_special_tokens": True},
}  # fmt: skip
_NAMES = ("__class__", "__dict__", "__init__", "", "self", "type", "a\nb", "\ud800", "properties", "$ref", "const", "0")
_ODD = (None, True, False, 0, -1, 0.0, -0.0, 1e308, 5e-324, 2**31, 2**63, 2**64, -(2**63) - 1, "", "\0", "a\nb", [], {})


def value(rng: random.Random, depth: int = 0) -> Any:
    """A value of JSON, an odd one."""
    kind = rng.randrange(8 if depth < 4 else 4)
    if kind < 2:
        return rng.choice(_ODD)
    if kind == 2:
        return rng.choice((-1, 1)) * 10 ** rng.randrange(400)
    if kind == 3:
        return rng.choice(_NAMES) * rng.choice((1, 1, 300))
    if kind == 4:
        return [value(rng, depth + 1) for _ in range(rng.randrange(4))]
    if kind == 5 and rng.random() < 0.1:
        deep: Any = 1
        for _ in range(rng.choice((70, 400, 900))):
            deep = [deep] if rng.random() < 0.5 else {"a": deep}
        return deep
    return {rng.choice(_NAMES): value(rng, depth + 1) for _ in range(rng.randrange(4))}


def body(rng: random.Random) -> tuple[str, bytes]:
    """A path and a body for it."""
    path = rng.choice([*SEEDS])
    made = deepcopy(SEEDS[path])
    for name in [name for name in made if name not in ("messages", "prompt") and rng.random() < 0.8]:
        del made[name]
    for _ in range(rng.randrange(4)):
        _change(rng, made)
    text = json.dumps(made)
    if made and rng.random() < 0.1:  # a key twice
        text = f"{text[:-1]}, {json.dumps(rng.choice([*made]))}: {json.dumps(value(rng))}}}"
    content = text.encode()
    if rng.random() < 0.05:
        at = rng.randrange(len(content) + 1)
        content = content[:at] + rng.choice((b"", b"\xff", b"\0", b"1e999", b"NaN", b'"', b"[")) + content[at + 1 :]
    return path, content


def _change(rng: random.Random, made: dict[str, Any]) -> None:
    """Another value at a place of any depth, or one more."""
    place: Any = made
    while rng.random() < 0.6:
        inner = [one for one in (place.values() if isinstance(place, dict) else place) if isinstance(one, dict | list)]
        if not [one for one in inner if one]:
            break
        place = rng.choice([one for one in inner if one])
    if isinstance(place, dict):
        place[rng.choice([*place, *place, rng.choice(_NAMES)])] = value(rng)
    else:
        place[rng.randrange(len(place))] = value(rng)


class Engine:
    """Takes messages apart as an engine does, and answers at once."""

    def __init__(self) -> None:
        self.alive, self.pid = True, 0
        self.ready = Ready(context=100, calls=None, reasoning=ReasoningForm(begin="<think>", end="</think>"))

    def listen(self, receive: Callable[[Any], None], lost: Callable[[], None]) -> None:
        self._receive = receive

    def send(self, message: ToEngine) -> None:
        read = messages.decode_for_engine(messages.framed(message)[messages.HEAD_BYTES :])
        match read:
            case Ask():
                answers: tuple[Any, ...] = (
                    Begun(read.id, 1, 0),
                    Piece(
                        id=read.id,
                        text="a",
                        tokens=1,
                        logprobs=[] if read.options.get("logprobs") is not None else None,
                    ),
                    Ended(read.id, "stop"),
                )
            case Cancel():
                answers = (Ended(read.id, "cancelled"),)
            case _:
                answers = (Encoded(read.id, [1]),)
        for answer in answers:
            asyncio.get_running_loop().call_soon(self._receive, answer)


class Server:
    """The application over the stand-in."""

    def __init__(self) -> None:
        metrics = Metrics()
        served = ServedModel("m", EngineArguments(bundle="b", opening=Opening(waiting=64)), ModelMetrics(metrics, "m"))
        served._take(Engine())  # type: ignore[arg-type]
        self.model, self._app = served, Service({"m": served}, Settings(), metrics).app()

    async def ask(self, path: str, content: bytes) -> tuple[int, bytes]:
        """Status and body of the answer."""
        told: list[Any] = []
        sent = asyncio.Event()

        async def receive() -> Any:
            if not sent.is_set():
                sent.set()
                return {"type": "http.request", "body": content, "more_body": False}
            return await asyncio.Future()  # nothing more comes

        async def send(message: Any) -> None:
            told.append(message)

        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b""}
        await self._app(scope | {"headers": headers, "http_version": "1.1", "scheme": "http"}, receive, send)
        return told[0]["status"], b"".join(message.get("body", b"") for message in told[1:])


async def bodies(cases: int, seed: int) -> tuple[Counter[int], list[str]]:
    """Answers by their status, and the faults."""
    server, counts, wrong = Server(), Counter[int](), list[str]()
    for number in range(cases):
        path, content = body(random.Random(f"{seed}/{number}"))
        try:
            status, answer = await asyncio.wait_for(server.ask(path, content), 60)
            told = json.loads(answer)["error"]["message"] if status >= 400 else ""
            if status >= 500 or "\n" in told or server.model._texts:
                wrong.append(f"case {number}: {status} {told[:200]} {content[:300]!r}")
        except Exception as error:  # any that leaves the server
            status = 500
            wrong.append(f"case {number}: {type(error).__name__}: {error} {content[:300]!r}")
        counts[status] += 1
    return counts, wrong


def schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema, of its own words and odd values."""
    kinds = ("object", "array", "string", "number", "integer", "boolean", "null")
    made: dict[str, Any] = {"type": rng.choice(kinds)} if rng.random() < 0.8 else {}
    numbers = ("minimum", "maximum", "exclusiveMinimum", "multipleOf", "minLength", "maxLength", "minItems", "maxItems")
    for name in rng.sample(numbers, rng.randrange(4)):
        made[name] = rng.choice((0, 1, 3, -1, 0.1, 1e9, 2**31 - 1, 2**53, -(2**63), 2**63 - 1, 1e-9))
    if rng.random() < 0.2:
        made["pattern"] = rng.choice(
            ("a{3,9}", "^(a|b)+$", "(?=a)b", "[", "a{1,99999}", r"\p{L}+", "(a*)*b", "\\u0041")
        )
    if rng.random() < 0.2:
        made[rng.choice(("const", "enum", "default"))] = rng.choice((-(2**63), 1.5, "a", [1], {"a": 1}, None))
    if depth < 3 and rng.random() < 0.6:
        made["properties"] = {rng.choice("ab\n$"): schema(rng, depth + 1) for _ in range(rng.randrange(3))}
        made["items"] = schema(rng, depth + 1)
        made[rng.choice(("anyOf", "allOf", "oneOf", "prefixItems"))] = [schema(rng, depth + 1) for _ in range(2)]
    return made


def schemas(cases: int, seed: int, tokenizer: Any, vocabulary: int) -> tuple[Counter[str], list[str]]:
    """Outcomes of random schemas in their own processes, and the faults."""
    from draftwood.errors import RequestError
    from draftwood.runtime.speculation.apart import ApartGrammars

    grammars, counts, wrong = ApartGrammars(tokenizer, vocabulary, [1]), Counter[str](), list[str]()
    for number in range(cases):
        rng = random.Random(f"{seed}/{number}")
        given, held = schema(rng), grammars.begin()
        try:
            held.compile(given, 0)
            for position in range(12):
                allowed = held.allowed(position).nonzero()[0].tolist()
                held.take(position, rng.choice(allowed))
            counts["held"] += 1
        except RequestError as error:
            counts["refused"] += 1
            if not str(error).startswith("grammar: ") or "\n" in str(error) or str(error).rstrip().endswith(":"):
                wrong.append(f"schema {number}: {error} {given}")
        except Exception as error:
            wrong.append(f"schema {number}: {type(error).__name__}: {error} {given}")
        held.close()
    return counts, wrong


def main() -> int:
    from draftwood.runtime.text.tokenizer import Tokenizer
    from draftwood.tests.bpe import save_tokenizer, train_tokenizer

    made = argparse.ArgumentParser(prog="python -m draftwood.tests.fuzz.bodies", description=__doc__)
    made.add_argument("--cases", type=int, default=10_000, metavar="N", help="bodies (default 10000)")
    made.add_argument("--schemas", type=int, default=300, metavar="N", help="schemas (default 300)")
    made.add_argument("--seed", type=int, default=0, metavar="S")
    args = made.parse_args()
    counts, wrong = asyncio.run(bodies(args.cases, args.seed))
    print(
        f"{args.cases} bodies, seed {args.seed}:", ", ".join(f"{n} x {status}" for status, n in sorted(counts.items()))
    )
    with tempfile.TemporaryDirectory() as folder:
        save_tokenizer(train_tokenizer([{"text": "the cat sat on the mat and the hat"}] * 9, 300), Path(folder))
        outcomes, more = schemas(args.schemas, args.seed, Tokenizer.load(Path(folder)), 300)
    print(f"{args.schemas} schemas:", ", ".join(f"{count} {what}" for what, count in sorted(outcomes.items())))
    wrong += more
    print(*(f"BAD {one}" for one in wrong), sep="\n", end="\n" if wrong else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
