"""Trouble of the machine below the server: a disk without room for logs, no file descriptors, a clock that jumps,
readers who take nothing."""

import contextlib
import http.client
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .conftest import WAIT, until

BODY = {"prompt": "the cat sat", "max_tokens": 8, "temperature": 0, "ignore_eos": True}


def answered(port: int) -> bool:
    """Whether the server on a port answers a text."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT)
    try:
        connection.request("POST", "/v1/completions", json.dumps(BODY), {"content-type": "application/json"})
        answer = connection.getresponse()
        return answer.status == 200 and json.loads(answer.read())["usage"]["completion_tokens"] == 8
    except OSError:
        return False
    finally:
        connection.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def test_a_full_disk_for_logs_stops_no_text(tiny_bundle: Path) -> None:
    port = free_port()
    command = [sys.executable, "-P", "-m", "draftwood.tools.cli", "serve", f"tiny={tiny_bundle}", "--threads", "1"]
    with Path("/dev/full").open("w") as full:
        process = subprocess.Popen([*command, "--port", str(port)], stdout=full, stderr=full, env=os.environ)
    try:
        until(lambda: answered(port))
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        (engine,) = map(int, children.read_text().split())
        os.kill(engine, signal.SIGKILL)  # what is told of that is not written either
        until(lambda: children.read_text().split() not in ([], [str(engine)]) and answered(port))
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT) == 0
    finally:
        process.kill()


def test_without_file_descriptors_it_waits_and_goes_on(started: Callable[..., Any], tiny_bundle: Path) -> None:
    server = started(f"tiny={tiny_bundle}", "--threads", 1, "--limit", "deadline=60")
    used = len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))
    usual = resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (used + 4, usual[1]))
    with contextlib.ExitStack() as idle:
        first = idle.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        for _ in range(20):
            idle.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        until(lambda: any("Too many open files" in line for line in server.lines))
        # Who is connected is served, and an engine that dies now is started again later.
        first.sendall(b"GET /ping HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert first.recv(100).startswith(b"HTTP/1.1 200")
        (engine,) = server.engines()
        os.kill(engine, signal.SIGKILL)
        until(lambda: any("next try in" in line for line in server.lines))
    resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, usual)
    until(lambda: answered(server.port))
    assert server.end() == 0


JUMPING = """
import time
real, jumps = time.time, [0]
def jump():
    jumps[0] += 1
    return real() + (-10**9, 0, 10**9)[jumps[0] % 3]
time.time = jump
"""


def test_a_clock_that_jumps_changes_nothing(started: Callable[..., Any], tiny_bundle: Path) -> None:
    server = started(f"tiny={tiny_bundle}", "--threads", 1, "--limit", "deadline=20", before=JUMPING)
    until(lambda: answered(server.port))
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT)
    created = set()
    for _ in range(6):  # on one connection, which no deadline may cut
        connection.request("POST", "/v1/completions", json.dumps(BODY), {"content-type": "application/json"})
        created.add(json.loads(connection.getresponse().read())["created"] // 10**9)
        time.sleep(0.1)
    assert len(created) > 1
    assert server.end() == 0


# More than sockets hold, which is some 4 MB: every token with the twenty likeliest, in 64 texts.
LARGE = {"prompt": ["the cat sat"] * 4, "max_tokens": 240, "ignore_eos": True, "stream": True, "logprobs": 20, "n": 16}


IMPATIENT = "from draftwood.tools.serve import http; http.SLOW_READER_SECONDS = 2"


@pytest.mark.slow
def test_who_takes_nothing_for_long_is_cut(started: Callable[..., Any], tiny_bundle: Path) -> None:
    server = started(f"tiny={tiny_bundle}", "--threads", 1, before=IMPATIENT)
    content = json.dumps(LARGE).encode()
    with socket.socket() as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.connect(("127.0.0.1", server.port))
        head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(content)}\r\n"
        reader.sendall(head.encode() + b"content-type: application/json\r\n\r\n" + content)
        until(lambda: server.metric("vllm:num_requests_running") > 0)
        until(server.idle)  # the engine has not waited
        until(lambda: any("/v1/completions" in line for line in server.lines))
        with contextlib.suppress(ConnectionResetError):
            while taken := reader.recv(1 << 20):
                assert b"[DONE]" not in taken
    assert answered(server.port) and server.end() == 0
