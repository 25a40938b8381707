"""The server's limits: full queues, clients that leave or are slow or many, and an engine that is killed."""

import asyncio
import contextlib
import gzip
import http.client
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from starlette.datastructures import URL
from starlette.requests import Request

from draftwood.errors import RequestError
from draftwood.tools.serve.app import Service, Settings
from draftwood.tools.serve.life import listening, serve
from draftwood.tools.serve.metrics import Metrics

from .conftest import LONG, WAIT, until

HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 9\r\n\r\n"
)


def begun(server: Any, body: dict, stream: bool = True) -> http.client.HTTPConnection:
    """A request that nobody reads."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT)
    content = json.dumps(body | {"stream": stream})
    connection.request("POST", "/v1/completions", content, {"content-type": "application/json"})
    return connection


def statuses(server: Any, count: int, body: dict) -> list[int]:
    """Of so many requests, handed in while the engine stands still, so that none can end meanwhile."""
    (engine,) = server.engines()
    os.kill(engine, signal.SIGSTOP)
    with ThreadPoolExecutor(count) as threads:
        asked = [threads.submit(server.ask, "/v1/completions", body) for _ in range(count)]
        until(lambda: server.metric("vllm:num_requests_waiting") >= count)
        os.kill(engine, signal.SIGCONT)
        return sorted(one.result()[0] for one in asked)


def test_a_full_queue_refuses_exactly_the_rest(server: Any) -> None:
    before = server.metric("vllm:admission_rejections_total")
    assert statuses(server, 12, LONG) == [200] * 5 + [503] * 7
    assert server.metric("vllm:admission_rejections_total") == before + 7


@pytest.mark.parametrize("stream", [True, False])
def test_clients_that_go_free_their_room(server: Any, stream: bool) -> None:
    for _ in range(10):
        connections = [begun(server, LONG, stream) for _ in range(5)]
        for connection in connections:
            connection.close()
    until(server.idle)
    assert server.ask("/v1/completions", LONG | {"max_tokens": 4})[0] == 200


def test_a_slow_reader_delays_nobody(server: Any) -> None:
    connection = begun(server, LONG)
    assert server.ask("/v1/completions", LONG | {"max_tokens": 4})[0] == 200
    until(server.idle)  # its text has ended although nobody has read it
    assert connection.getresponse().read().endswith(b"data: [DONE]\n\n")


# Requests that never end: what is sent, and what then drops in.
ENDLESS: dict[str, tuple[bytes, bytes]] = {
    "idle": (b"", b""),
    "half a header": (b"POST /v1/completions HTTP/1.1\r\nhost: x", b""),
    "half a body": (HEAD + b"{", b""),
    "body of a GET": (b"GET /version HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n{", b""),
    "drops of empty lines": (b"", b"\r\n"),
    "drops of a header": (b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nx: ", b"x"),
    "drops of many headers": (b"POST /v1/completions HTTP/1.1\r\n", b"x: x\r\n"),
    "drops of a body": (HEAD.replace(b": 9", b": 900"), b" "),
    "drops of chunks": (HEAD.replace(b"content-length: 9", b"transfer-encoding: chunked"), b"1\r\n \r\n"),
}


def end_of(port: int, sent: bytes, drop: bytes) -> None:
    """Waits until the server cuts it: its deadline is 2 s; without one there is no end."""
    with socket.create_connection(("127.0.0.1", port), timeout=WAIT) as connection:
        connection.sendall(sent)
        if not drop:
            with contextlib.suppress(ConnectionResetError):
                while connection.recv(4096):
                    pass
            return
        limit = time.monotonic() + WAIT
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            while time.monotonic() < limit:
                connection.sendall(drop)
                time.sleep(0.2)


@pytest.fixture(scope="module")
def ends(server: Any) -> dict[str, Future[None]]:
    """All of them at once, since each waits for a deadline."""
    with ThreadPoolExecutor(len(ENDLESS)) as threads:
        return {name: threads.submit(end_of, server.port, *both) for name, both in ENDLESS.items()}


@pytest.mark.parametrize("name", ENDLESS)
def test_who_never_finishes_a_request_is_cut(ends: dict[str, Future[None]], name: str) -> None:
    ends[name].result()


@pytest.mark.parametrize("size", [40_000, 3_000_000])
@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_is_too_large(server: Any, chunked: bool, size: int) -> None:
    """The client reads the answer once it has sent all, which the server had not read."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT)
    content = b'{"prompt": "' + b"x" * size + b'"}'
    body = iter([content[:15000], content[15000:]]) if chunked else content
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"}, encode_chunked=chunked)
    answer = connection.getresponse()
    assert answer.status == 413
    assert json.loads(answer.read())["error"]["type"] == "invalid_request_error"


def preflight(server: Any, origin: str) -> http.client.HTTPResponse:
    """A browser's question before a page of another origin may send a request with a key to this machine."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT)
    asked = {"method": "POST", "headers": "authorization", "private-network": "true"}
    headers = {f"access-control-request-{name}": value for name, value in asked.items()}
    connection.request("OPTIONS", "/v1/completions", headers={"origin": origin} | headers)
    return connection.getresponse()


def test_a_name_of_a_field_forges_no_line(server: Any) -> None:
    status, answer, _ = server.ask("/v1/completions", LONG | {"max_tokens": 1, "num\nforged: yes": 1})
    assert status == 400 and "\n" not in answer["error"]["message"]
    assert not any(line.startswith("forged") for line in server.lines)


def test_prompts_that_wait_for_their_tokens_are_bounded(server: Any) -> None:
    (engine,) = server.engines()
    os.kill(engine, signal.SIGSTOP)
    with ThreadPoolExecutor(70) as threads:
        asked = [threads.submit(server.ask, "/tokenize", {"prompt": "the cat"}) for _ in range(70)]
        until(lambda: sum(one.done() for one in asked) >= 6)
        os.kill(engine, signal.SIGCONT)
        assert sorted(one.result()[0] for one in asked) == [200] * 64 + [503] * 6


def test_a_body_that_is_compressed_is_refused_by_its_coding(server: Any) -> None:
    content = gzip.compress(json.dumps(LONG).encode())
    status, answer, _ = server.ask("/v1/completions", content, content_encoding="gzip")
    assert status == 415 and answer["error"]["message"].startswith("content-encoding: ")
    assert server.ask("/v1/completions", LONG | {"max_tokens": 1}, content_encoding="identity")[0] == 200


def test_every_loopback_address_is_this_machine(server: Any) -> None:
    for host in ("127.0.0.2", "[::1]:80", "LOCALHOST:1"):
        assert server.ask("/v1/models", None, host=host)[0] == 200
    with socket.create_connection(("127.0.0.1", server.port), timeout=WAIT) as connection:
        connection.sendall(b"GET /health HTTP/1.0\r\n\r\n")  # as HAProxy's checks
        assert connection.recv(4096).startswith(b"HTTP/1.1 200 ")


def test_an_idle_connection_stays_until_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """uvicorn has a clock of its own for it."""

    def config(app: Any, **options: Any) -> None:
        raise RuntimeError(f"{options['timeout_keep_alive']} s")

    monkeypatch.setattr("uvicorn.Config", config)
    with socket.socket() as listener, pytest.raises(RuntimeError, match=r"^60 s$"):
        asyncio.run(serve(Service({}, Settings(deadline=60), Metrics()), listener, 0))


@pytest.mark.parametrize("host", ["a..b", "[::1]", "192.0.2.1"])
def test_a_host_that_is_not_here_is_one_line(host: str) -> None:
    with pytest.raises(RequestError, match=r"^--host .*; give an address of this machine$"):
        listening(host, 0)


def test_a_page_of_another_origin_gets_nothing(server: Any) -> None:
    assert server.ask("/v1/completions", LONG, content_type="text/plain")[0] == 415
    for host in ("evil.example", "127.0.0.1.evil.example", "localhost:1.evil.example", ""):
        assert server.ask("/v1/models", None, host=host)[0] == 403
    assert "access-control-allow-origin" not in server.ask("/v1/models", None, origin="http://evil.example")[2]


def test_a_killed_engine_is_started_again(server: Any) -> None:
    connection = begun(server, LONG)
    answer = connection.getresponse()
    answer.readline()
    (engine,) = server.engines()
    os.kill(engine, signal.SIGSTOP)  # so that the text cannot end before
    os.kill(engine, signal.SIGKILL)
    last = json.loads(answer.read().decode().strip().splitlines()[-1][6:])
    assert last["error"]["code"] == "engine_failed"
    until(lambda: server.ask("/health")[0] == 200 and server.engines() != [engine])
    assert server.ask("/health")[1]["models"]["tiny"]["restarts"] == 1
    assert server.metric("draftwood_engine_restarts_total") == 1
    assert server.ask("/v1/completions", LONG | {"max_tokens": 4})[0] == 200


def test_a_text_that_waited_when_the_engine_died_is_answered(server: Any) -> None:
    (engine,) = server.engines()
    os.kill(engine, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(server.ask, "/v1/completions", LONG | {"max_tokens": 4})
        until(lambda: server.metric("vllm:num_requests_waiting") == 1)
        os.kill(engine, signal.SIGKILL)
        assert asked.result()[0] == 200
    until(lambda: server.ask("/health")[0] == 200)


def test_metrics_tell_what_the_caches_hold(server: Any) -> None:
    """The server has room for two such texts; the prompt is known the second time, but for its last token."""
    prompt = "the mat and the hat and the cat sat on the mat and the hat" * 2
    before = server.metric("vllm:prefix_cache_hits_total")
    connection = begun(server, LONG | {"prompt": prompt})
    answer = connection.getresponse()
    answer.readline()
    assert server.metric("vllm:kv_cache_usage_perc") in (0.5, 0)  # the text may have ended already
    answer.read()
    until(server.idle)
    assert server.metric("vllm:kv_cache_usage_perc") == 0
    usage = server.ask("/v1/completions", LONG | {"prompt": prompt, "max_tokens": 4})[1]["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1 >= 16
    assert server.metric("vllm:prefix_cache_hits_total") == before + usage["prompt_tokens"] - 1


def test_a_bundle_is_replaced_without_losing_a_request(server: Any) -> None:
    (old,) = server.engines()
    answers: list[int] = []
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            answers.append(server.ask("/v1/completions", LONG | {"max_tokens": 40})[0])

    asking = threading.Thread(target=ask)
    asking.start()
    server.process.send_signal(signal.SIGHUP)
    until(lambda: len(server.engines()) == 1 and server.engines() != [old])
    stop.set()
    asking.join()
    assert set(answers) == {200}


def test_keys(started: Callable[..., Any], tiny_bundle: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("one\ntwo\n")
    server = started(
        tiny_bundle, "--api-key-file", keys, "--limit", "per-key=1", "--threads", 1, "--cors", "http://one.example"
    )
    assert server.ask("/health")[0] == 200
    for origin, status in (("http://one.example", 200), ("http://two.example", 400)):  # browsers ask without the key
        got = preflight(server, origin)
        assert (got.status, got.headers["access-control-allow-origin"]) == (status, origin if status == 200 else None)
    body = LONG | {"max_tokens": 2}
    for headers in ({}, {"authorization": "Bearer three"}, {"authorization": "Basic one"}):
        status, answer, shown = server.ask("/v1/completions", body, origin="http://one.example", **headers)
        assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
        assert shown["access-control-allow-origin"] == "http://one.example", "else a browser shows the page nothing"
    for key in ("one", "two"):
        assert server.ask("/v1/completions", body, authorization=f"Bearer {key}")[0] == 200
    (engine,) = server.engines()
    os.kill(engine, signal.SIGSTOP)
    with ThreadPoolExecutor(3) as threads:
        asked = [threads.submit(server.ask, "/v1/completions", body, authorization="Bearer one") for _ in range(3)]
        until(lambda: sum(one.done() for one in asked) >= 2)
        assert server.ask("/v1/models", authorization="Bearer two")[0] == 200
        os.kill(engine, signal.SIGCONT)
        found = [one.result() for one in asked]
    assert sorted(status for status, _, _ in found) == [200, 429, 429]
    assert all(headers["retry-after"] for status, _, headers in found if status == 429)
    assert server.end() == 0


def test_sigterm_lets_eight_streams_end(started: Callable[..., Any], tiny_bundle: Path) -> None:
    server = started(tiny_bundle, "--limit", f"caches={1 << 30}", "--threads", 1)
    connections = [begun(server, LONG) for _ in range(8)]
    answers = [connection.getresponse() for connection in connections]
    (engine,) = server.engines()
    os.kill(engine, signal.SIGSTOP)  # no text ends before the server has been asked
    server.process.send_signal(signal.SIGTERM)
    until(lambda: server.ask("/health")[1]["status"] == "draining")
    assert server.ask("/v1/completions", LONG)[1]["error"]["code"] == "draining"
    os.kill(engine, signal.SIGCONT)
    assert all(answer.read().endswith(b"data: [DONE]\n\n") for answer in answers)
    assert server.process.wait(WAIT) == 0
    assert not any("cat sat" in line for line in server.lines)


def test_two_hundred_clients_that_go_leave_nothing_behind(server: Any) -> None:
    with ThreadPoolExecutor(20) as threads:
        connections = list(threads.map(lambda number: begun(server, LONG, number % 2 == 0), range(200)))
        for connection in connections:
            connection.close()
    until(server.idle)
    assert server.metric("vllm:kv_cache_usage_perc") == 0
    assert server.ask("/v1/completions", LONG | {"max_tokens": 4})[0] == 200


def test_a_second_signal_ends_it_now(started: Callable[..., Any], tiny_bundle: Path) -> None:
    server = started(tiny_bundle, "--threads", 1, "--limit", "drain=300")
    answer = begun(server, LONG).getresponse()
    answer.readline()
    (engine,) = server.engines()
    os.kill(engine, signal.SIGSTOP)  # its text never ends
    server.process.send_signal(signal.SIGTERM)
    until(lambda: server.ask("/health")[1]["status"] == "draining")
    server.process.send_signal(signal.SIGTERM)
    server.process.wait(WAIT)  # its first signal would have given the text 300 s
    with pytest.raises(ProcessLookupError):
        os.kill(engine, 0)


def test_several_bundles_by_name(started: Callable[..., Any], tiny_bundle: Path, tiny_draft_bundles: Any) -> None:
    server = started(f"one={tiny_bundle}", f"two={tiny_draft_bundles['fasteagle']}", "--threads", 1)
    assert [model["id"] for model in server.ask("/v1/models")[1]["data"]] == ["one", "two"]
    assert server.ask("/v1/models/two")[1]["id"] == "two" and server.ask("/v1/models/three")[0] == 404
    body = LONG | {"max_tokens": 8, "draftwood": {"policy": "adaptive"}}
    for model in ("one", "two"):
        status, answer, _ = server.ask("/v1/completions", body | {"model": model})
        assert (status, answer["model"], answer["usage"]["completion_tokens"]) == (200, model, 8)
        assert server.ask("/tokenize", {"model": model, "prompt": "the cat"})[0] == 200
    status, answer, _ = server.ask("/v1/completions", body)
    assert (status, answer["error"]["param"], answer["error"]["code"]) == (404, "model", "model_not_found")
    one, two = server.engines()
    os.kill(one, signal.SIGKILL)
    assert server.ask("/v1/completions", body | {"model": "two"})[0] == 200
    assert two in server.engines() and server.end() == 0


def test_headers_that_are_too_large_are_told_so(server: Any) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=WAIT) as connection:
        connection.sendall(b"GET /version HTTP/1.1\r\nhost: localhost\r\n" + (b"x: " + b"x" * 4096 + b"\r\n") * 256)
        content = b"".join(iter(lambda: connection.recv(4096), b""))
    assert content.startswith(b"HTTP/1.1 431 ") and b"invalid_request_error" in content
    with socket.create_connection(("127.0.0.1", server.port), timeout=WAIT) as connection:
        connection.sendall(b"\x16\x03\x01 no request\r\n\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("schema", [{"const": 2**53 + 1}, {"multipleOf": 2147483647}], ids=["number", "endless"])
def test_a_schema_ends_no_text_but_its_own(server: Any, schema: dict[str, Any]) -> None:
    pytest.importorskip("llguidance")
    beside, engines = begun(server, LONG), server.engines()
    asked = {"type": "json_schema", "json_schema": {"schema": schema}}
    body = {"prompt": "the cat", "max_tokens": 40, "response_format": asked}
    status, answer, _ = server.ask("/v1/completions", body)
    assert status == 400 and answer["error"]["param"] == "response_format" and "\n" not in answer["error"]["message"]
    assert beside.getresponse().read().endswith(b"data: [DONE]\n\n") and server.engines() == engines


@pytest.mark.parametrize("path", ["/", "/page.js"])
def test_the_page_does_not_depend_on_the_host_that_a_request_names(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # As starlette 1.0.0 reads the URL of the host a?x.
    monkeypatch.setattr(Request, "url", property(lambda _: URL("http://a?x" + path)))
    request = Request({"type": "http", "method": "GET", "path": path, "headers": [(b"host", b"a?x")]})
    assert asyncio.run(Service({}, Settings(), Metrics()).page(request)).status_code == 200


def test_metrics_are_of_the_process_alone(python: Callable[..., str], tmp_path: Path) -> None:
    counted = """
from draftwood.tools.serve.metrics import Metrics, ModelMetrics
metrics = Metrics()
ModelMetrics(metrics, "m").began(0.1, 7, 0)
print(*[line for line in metrics.text().decode().splitlines() if line.startswith("vllm:prompt_tokens_total")])
"""
    # As of a service next to it that counts in several processes, whose folder need not be there.
    variables = {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path / "none")}
    assert python(counted, environment=variables).split()[-1] == "7.0"
