"""Other programs as `draftwood.tools.benchmarks.peers` opens them, in a file that a process of their own can import."""

from __future__ import annotations

import json
import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from draftwood.tools.benchmarks.peers import Generate


def broken(model: Path, work: Path, threads: int) -> Generate:
    raise RuntimeError("reads no such checkpoint")


def crashing(model: Path, work: Path, threads: int) -> Generate:
    return lambda ids, count, temperature: os._exit(9)


def echoing(model: Path, work: Path, threads: int) -> Generate:
    return lambda ids, count, temperature: [*ids, *ids][:count]


class Server(BaseHTTPRequestHandler):
    """Streams as many words as it is asked for."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        assert asked["stream"] and not asked["cache_prompt"] and asked["ignore_eos"]
        self.send_response(200)
        self.end_headers()
        for _ in range(asked["max_tokens"]):
            self.say({"choices": [{"text": "word "}]})
        self.say({"choices": [], "usage": {"completion_tokens": asked["max_tokens"]}})

    def say(self, chunk: dict) -> None:
        self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""


if __name__ == "__main__":
    given = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
    assert Path(given["-m"]).read_bytes()[:4] == b"GGUF" and int(given["-np"]) in (1, 2), given
    ThreadingHTTPServer(("127.0.0.1", int(given["--port"])), Server).serve_forever()
