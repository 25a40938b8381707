"""The service at length: 64 clients of every kind, for as long as ``DRAFTWOOD_SOAK_SECONDS`` says (two minutes).

    DRAFTWOOD_SOAK_SECONDS=3600 python -m pytest -m slow -s tests/tools/serve/test_soak.py

Every ``DRAFTWOOD_SOAK_KILL_SECONDS`` (five minutes) the engine's process is killed. Held to: every finished text is
plain decoding's, no error that was not asked for, memory that does not grow, and all room free at the end. A kill may
end the answers that were being written then, each with an error that says so, and the next engine answers the rest.
"""

from __future__ import annotations

import faulthandler
import http.client
import json
import os
import random
import signal
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import draftwood
from draftwood.compiler.bundle.build import build
from draftwood.compiler.bundle.request import BuildRequest
from draftwood.tests import fixtures
from draftwood.trees import Topology

from .conftest import until

pytestmark = pytest.mark.slow

CLIENTS = 64
SECONDS = float(os.environ.get("DRAFTWOOD_SOAK_SECONDS", "120"))
# Seconds beyond them after which the test hangs; the limit in pyproject.toml is that of tests that take minutes.
SPARE_SECONDS = 1500
KILL_SECONDS = float(os.environ.get("DRAFTWOOD_SOAK_KILL_SECONDS", "300"))
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.0},
    {"temperature": 1.2, "top_k": 40},
]
SCHEMA = {
    "type": "object",
    "properties": {
        "mood": {"enum": ["good", "bad"]},
        "parts": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
    },
    "required": ["mood", "parts"],
    "additionalProperties": False,
}
KINDS = {
    "stream": 50,
    "whole": 15,
    "gone": 15,
    "slow": 8,
    "cancelled": 5,
    "oversized": 3,
    "long prompt": 2,
    "no json": 2,
}
# The expected answer of each kind that waits for one.
EXPECTED = {"stream": 200, "whole": 200, "slow": 200, "oversized": 413, "long prompt": 400, "no json": 400}


def texts() -> list[dict[str, Any]]:
    """The requests: every built-in prompt, with every sampling in turn, a third of them held to a schema."""
    from draftwood.tools.prompts import BUILT_IN, read_prompts

    found: list[dict[str, Any]] = []
    for number, prompt in enumerate(read_prompts(BUILT_IN) * 3):
        held = (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}} if number % 3 == 2 else {}
        )
        body = {"prompt": prompt.text, "max_tokens": 24 + 8 * (number % 5), "seed": number}
        found.append(body | SAMPLINGS[number % len(SAMPLINGS)] | held)
    return found


class EngineFailed(Exception):
    """The error of an answer that an engine's end cut off."""


def checked(body: dict[str, Any]) -> dict[str, Any]:
    """A body of an answer, or of a part of one; EngineFailed if it says that."""
    if body.get("error", {}).get("code") == "engine_failed":
        raise EngineFailed
    return body


class Clients:
    """The results of all clients."""

    def __init__(self, port: int, until: float) -> None:
        self._port, self._until, self._texts = port, until, texts()
        self.counts: Counter[str] = Counter()
        self.finished: set[tuple[int, str]] = set()
        self.errors: list[str] = []
        self._lock = threading.Lock()

    def run(self, seed: int) -> None:
        chance = random.Random(seed)
        while time.monotonic() < self._until:
            (kind,) = chance.choices(list(KINDS), list(KINDS.values()))
            try:
                self._one(kind, chance)
            except EngineFailed:
                with self._lock:
                    self.counts["cut off"] += 1
            except Exception as error:
                with self._lock:
                    self.errors.append(f"{kind}: {error!r}")

    def _one(self, kind: str, chance: random.Random) -> None:
        number = chance.randrange(len(self._texts))
        body = self._texts[number] | {"stream": kind in ("stream", "slow", "gone")}
        if kind == "long prompt":
            body["prompt"] = "word " * 5000
        content = json.dumps(body).encode()
        content = {"oversized": b'"' + b"x" * 70000, "no json": content[:-2]}.get(kind, content)
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=300)
        try:
            connection.request("POST", "/v1/completions", content, {"content-type": "application/json"})
            if kind == "cancelled":
                time.sleep(chance.random() / 5)
            else:
                self._read(kind, chance, connection.getresponse(), number)
        finally:
            connection.close()
        with self._lock:
            self.counts[kind] += 1

    def _read(self, kind: str, chance: random.Random, answer: http.client.HTTPResponse, number: int) -> None:
        if kind == "gone":
            for _ in range(chance.randrange(20)):
                answer.readline()
            return
        if answer.status != EXPECTED[kind]:
            content = answer.read()
            assert not checked(json.loads(content)), (answer.status, content[:300])
        if kind in ("stream", "slow"):
            self._done(number, "".join(pieces(answer, 0.02 if kind == "slow" else 0)))
        elif kind == "whole":
            self._done(number, json.loads(answer.read())["choices"][0]["text"])
        else:
            assert json.loads(answer.read())["error"]["type"] == "invalid_request_error"

    def _done(self, number: int, text: str) -> None:
        with self._lock:
            self.finished.add((number, text))
            self.counts["texts"] += 1


def pieces(answer: http.client.HTTPResponse, pause: float) -> Iterator[str]:
    """The text of a stream, which has to end as one does."""
    last = ""
    while line := answer.readline().decode().strip() or answer.readline().decode().strip():
        last = line.removeprefix("data: ")
        if last == "[DONE]":
            break
        yield checked(json.loads(last))["choices"][0]["text"]
        time.sleep(pause)
    assert last == "[DONE]", last


class Kills:
    """Ends the engine's process every so many seconds, but not if the run ends before the next one could serve."""

    def __init__(self, server: Any, until: float) -> None:
        self._server, self._until, self.count = server, until, 0
        self._due = time.monotonic() + KILL_SECONDS

    def look(self) -> None:
        if self._due < time.monotonic() < self._until - KILL_SECONDS / 2:
            (engine,) = self._server.engines()
            os.kill(engine, signal.SIGKILL)
            self.count, self._due = self.count + 1, self._due + KILL_SECONDS


def resident(server: Any, below: bool) -> int:
    """Bytes of the server's process, or of all below it as well."""
    found, processes = 0, [server.process.pid]
    while processes:
        pid = processes.pop()
        try:
            found += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            if below:
                processes += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        except OSError:  # it has just ended
            continue
    return found


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    trees = (("plain", Topology.plain()), *((f"backbone-{d}-2", Topology.backbone(d, 2)) for d in (2, 4)))
    folder = tmp_path_factory.mktemp("soak") / "bundle"
    build(BuildRequest(model=fixtures.TEACHER, drafter=fixtures.MEDUSA, trees=trees, slots=(1024,)), folder)
    return folder


def test_sixty_four_clients_at_length(started: Callable[..., Any], bundle: Path) -> None:
    faulthandler.dump_traceback_later(SECONDS + SPARE_SECONDS, exit=True, file=sys.__stderr__)
    server = started(f"demo={bundle}", "--limit", "body=65536", "--limit", f"waiting={CLIENTS}")
    ends, memory = time.monotonic() + SECONDS, list[int]()
    clients, kills = Clients(server.port, ends), Kills(server, ends)
    with ThreadPoolExecutor(CLIENTS) as threads:
        running = [threads.submit(clients.run, seed) for seed in range(CLIENTS)]
        while not all(one.done() for one in running):
            # An engine that is killed begins again with little; what lives for the whole time is the server.
            memory.append(resident(server, below=KILL_SECONDS > SECONDS))
            kills.look()
            time.sleep(0.5)
    until(server.idle)
    quarter = len(memory) // 4
    # Until then kept beginnings of prompts fill their budget.
    third, last = statistics.mean(memory[2 * quarter : 3 * quarter]), statistics.mean(memory[-quarter:])
    with draftwood.open(bundle, prefixes=False) as model:
        differing = [number for number, text in clients.finished if text != plain(model, clients._texts[number])]
    report = {
        "seconds": SECONDS,
        "requests": dict(clients.counts),
        "different_texts_asked_for": len({number for number, _ in clients.finished}),
        "texts_unlike_plain": len(differing),
        "errors": len(clients.errors),
        "kills": kills.count,
        "resident_mb": {"third_quarter": round(third / 2**20, 1), "last_quarter": round(last / 2**20, 1)},
        "cache_usage_at_the_end": server.metric("vllm:kv_cache_usage_perc"),
        "tokens": server.metric("vllm:generation_tokens_total"),
        "prefix_tokens": server.metric("vllm:prefix_cache_hits_total"),
    }
    print(json.dumps(report, indent=1))
    assert clients.errors == [] and differing == [], (clients.errors[:5], differing)
    assert clients.counts["texts"] >= CLIENTS and report["cache_usage_at_the_end"] == 0
    assert last < 1.03 * third + 8 * 2**20
    assert clients.counts["cut off"] <= CLIENTS * kills.count
    assert server.ask("/health")[1]["models"]["demo"]["restarts"] == kills.count
    assert server.end() == 0


def plain(model: Any, body: dict[str, Any]) -> str:
    """Plain decoding of the same, alone."""
    asked = {name: body[name] for name in ("temperature", "top_p", "top_k", "seed") if name in body}
    grammar = SCHEMA if "response_format" in body else None
    result = model.generate(body["prompt"], policy="plain", max_new_tokens=body["max_tokens"], grammar=grammar, **asked)
    assert result.text is not None
    return str(result.text)
