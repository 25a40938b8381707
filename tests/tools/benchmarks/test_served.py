"""Servers that are measured end with the process that started them; what they answer is measured, or is one line."""

import os
import signal
import subprocess
import sys
from socketserver import StreamRequestHandler, TCPServer
from threading import Thread

import pytest

from draftwood.errors import RequestError
from draftwood.tools.benchmarks.served import stream

# Starts a "server" that says when it runs, and never ends; then waits for ever.
PARENT = """
import os, subprocess, sys
from draftwood.tools.benchmarks.served import WITH_PARENT
child = "import signal, sys; print('runs', flush=True); signal.pause()"
subprocess.Popen([*WITH_PARENT, str(os.getpid()), sys.executable, "-c", child, *sys.argv[1:]]).wait()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's own way of Linux")
def test_a_killed_parent_takes_its_server_with_it() -> None:
    read, write = os.pipe()
    parent = subprocess.Popen([sys.executable, "-P", "-c", PARENT], stdout=write)
    os.close(write)
    with os.fdopen(read) as said:
        assert said.readline() == "runs\n"
        parent.send_signal(signal.SIGKILL)
        # The end of the file comes when parent and server have both ended.
        assert said.read() == ""
    parent.wait()


OK = b"HTTP/1.0 200 OK\r\n\r\n"


@pytest.mark.parametrize(
    ("said", "line"),
    [
        (b"", r"no answer that can be read \(RemoteDisconnected"),
        (b"what?\r\n", r"no answer that can be read \(BadStatusLine: what\?"),
        (OK + b'data: {"choices\n', r"no answer that can be read \(JSONDecodeError"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nda", r"can be read \(IncompleteRead"),
        (OK + b'data: {"error": 1}\n', r'0 tokens, expected 8; it last said data: {"error": 1}'),
        (b"HTTP/1.0 500 No\r\n\r\nbroken\n", "POST /v1/completions: 500 broken"),
    ],
)
def test_an_answer_that_cannot_be_measured_is_one_line(said: bytes, line: str) -> None:
    class Says(StreamRequestHandler):
        def handle(self) -> None:
            while self.rfile.readline().strip():
                pass
            self.wfile.write(said)

    with TCPServer(("127.0.0.1", 0), Says) as server:
        answering = Thread(target=server.handle_request, daemon=True)
        answering.start()
        with pytest.raises(RequestError, match=line):
            stream(server.server_address[1], [1], 8)
        answering.join()
