"""A server under clients that stream: ours, or another that speaks OpenAI's interface."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from draftwood.errors import RequestError
from draftwood.threads import default_threads
from draftwood.tools.benchmarks.peers import gguf_file

# To be ready, for one answer, and to end.
READY_SECONDS, ANSWER_SECONDS, END_SECONDS = 300, 600, 60
OURS = "draftwood serve"
LLAMA = "llama-server"
_PATH = "/v1/completions"


@dataclass(frozen=True)
class Server:
    """A server of ``name`` that is ready, and the seconds that it took to be."""

    name: str
    port: int
    ready_seconds: float


@dataclass(frozen=True)
class StreamedAnswer:
    """One streamed answer: seconds from the request to its first and to its last tokens, and how many those were."""

    first_seconds: float
    seconds: float
    tokens: int


def our_command(bundle: Path, engine: str) -> list[str]:
    """Serves a bundle, without keeping caches: prompts come again in every round."""
    serve = [sys.executable, "-P", "-m", "draftwood.tools.cli", "serve", f"demo={bundle}"]
    return [*serve, "--engine", engine, "--no-prefixes"]


def llama_command(file: Path, clients: int, context: int) -> list[str]:
    """llama-server on a GGUF file, a slot a client, each of ``context`` tokens, with as many threads as ours has."""
    threads, room = str(default_threads()), str(clients * context)
    return [LLAMA, "-m", str(file), "-np", str(clients), "-c", room, "-t", threads, "-tb", threads]


def why_missing(checkpoint: str | None) -> str:
    """Why llama.cpp's server cannot be measured on a checkpoint; nothing if it can."""
    if checkpoint is None:
        return f"{LLAMA} reads the teacher's checkpoint: give --model"
    if gguf_file(Path(checkpoint)) is None:
        return f"{LLAMA} reads GGUF files; {checkpoint} is none"
    return "" if shutil.which(LLAMA) else f"{LLAMA} is not on PATH"


# Before a command: has the kernel end it with the process that starts it, however that ends.
WITH_PARENT = (
    sys.executable, "-I", "-S", "-c",
    "import ctypes, os, signal, sys\n"
    "parent = int(sys.argv[1])\n"
    "if sys.platform == 'linux': ctypes.CDLL(None).prctl(1, signal.SIGTERM)\n"  # PR_SET_PDEATHSIG
    "if os.getppid() != parent: sys.exit(1)\n"
    "os.execvp(sys.argv[2], sys.argv[2:])",
)  # fmt: skip


@contextmanager
def serving(name: str, command: Sequence[str]) -> Iterator[Server]:
    """Starts a server on a free port of loopback, and ends it.

    Raises:
        RequestError: it ended before it was ready, or was not in time.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    began = time.perf_counter()
    process = subprocess.Popen(
        [*WITH_PARENT, str(os.getpid()), *command, "--port", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        stdin=subprocess.DEVNULL,
    )
    try:
        while not _ready(port):
            if process.poll() is not None or time.perf_counter() - began > READY_SECONDS:
                raise RequestError(f"{name}: not ready, exit status {process.poll()}; run it: {' '.join(command)}")
            time.sleep(0.02)
        yield Server(name, port, round(time.perf_counter() - began, 3))
    finally:
        process.terminate()
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _ready(port: int) -> bool:
    try:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):  # not there yet, or somebody else's
        return False


def load(server: Server, prompts: Sequence[Sequence[int]], clients: int, count: int) -> dict[str, Any]:
    """``clients`` that each ask for the next prompt as soon as an answer has ended.

    Returns:
        ``tokens_per_s`` of all answers, and by answer ``first_ms`` to the first tokens and ``gap_ms`` a token after.
    """
    began = time.perf_counter()
    with ThreadPoolExecutor(clients) as threads:
        streams = list(threads.map(partial(stream, server.port, count=count), prompts))
    return figures(streams, time.perf_counter() - began)


def figures(streams: Sequence[StreamedAnswer], seconds: float) -> dict[str, Any]:
    """Figures that `load` returns, of answers that took ``seconds`` together."""
    gaps = [(stream.seconds - stream.first_seconds) / max(1, stream.tokens - 1) for stream in streams]
    return {
        "tokens_per_s": round(sum(stream.tokens for stream in streams) / seconds, 3),
        "first_ms": [round(stream.first_seconds * 1e3, 3) for stream in streams],
        "gap_ms": [round(gap * 1e3, 3) for gap in gaps],
    }


def stream(port: int, ids: Sequence[int], count: int) -> StreamedAnswer:
    """One greedy answer of ``count`` tokens to a prompt of token ids.

    Raises:
        RequestError: the server answers with an error, with fewer tokens, or not at all.
    """
    began = time.perf_counter()
    # llama-server otherwise keeps a slot's last prompt.
    extensions = {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True, "cache_prompt": False}
    first = last = 0.0
    tokens, said = 0, b""
    with _asked(port, {"prompt": list(ids), "max_tokens": count, "temperature": 0, **extensions}) as answer:
        while line := answer.readline():
            if not line.startswith(b"data: {"):
                continue
            said = line
            chunk = json.loads(line[6:])
            tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
            # We begin with an empty chunk, and others end with one.
            if any(choice.get("text") for choice in chunk.get("choices", ())):
                last = time.perf_counter() - began
                first = first or last
    if tokens != count:
        raise RequestError(f"{_PATH}: {tokens} tokens, expected {count}; it last said {_shown(said)}")
    return StreamedAnswer(first, last, tokens)


def accepted(port: int, text: str, count: int, schema: dict[str, Any] | None) -> float | None:
    """Tokens a drafted step of an answer, held to a JSON schema or free; None if no step drafted."""
    constraint = {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}}
    body = {"prompt": text, "max_tokens": count, "temperature": 0, **(constraint if schema else {})}
    with _asked(port, body) as answer:
        drafted = json.loads(answer.read())["usage"]["speculative_decoding"]
        return drafted["mean_acceptance_length"] if drafted else None


@contextmanager
def _asked(port: int, body: dict[str, Any]) -> Iterator[http.client.HTTPResponse]:
    """The answer to a request; RequestError if the server is gone, is late, or says what no such server does."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_SECONDS)
    try:
        connection.request("POST", _PATH, json.dumps(body).encode(), {"content-type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise RequestError(f"POST {_PATH}: {answer.status} {_shown(answer.read(300))}")
        yield answer
    except (OSError, http.client.HTTPException, ValueError, TypeError, KeyError, AttributeError) as error:
        raise RequestError(
            f"POST {_PATH}: no answer that can be read ({type(error).__name__}: {_shown(str(error).encode())}); the"
            " server that is measured has ended, is slow, or speaks otherwise; run it by itself, then evaluate again"
        ) from error
    finally:
        connection.close()


def _shown(said: bytes) -> str:
    """The begin of what a server said, on one line."""
    return " ".join(said[:300].decode(errors="replace").split()) or "nothing"
