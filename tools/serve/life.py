"""The server's life: engines first, then the port; signals drain, replace or end it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import math
import os
import signal
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

import uvicorn

from draftwood.errors import RequestError
from draftwood.files import lines_of, read_text
from draftwood.tools.serve.app import Service
from draftwood.tools.serve.http import protocol

log = logging.getLogger("draftwood.serve")

# Between the last answer and the end, for its bytes to leave.
GRACE_SECONDS = 2


def listening(host: str, port: int) -> socket.socket:
    """A socket that is bound before engines are started, so that a port that is taken is noticed at once.

    Raises:
        RequestError: it cannot be bound.
    """
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:  # UnicodeError: no name that a resolver could be asked for
        reason = error.strerror if isinstance(error, OSError) else "no host has such a name"
        raise RequestError(f"--host {host}: {reason}; give an address of this machine") from error
    try:
        return socket.create_server(address, family=family, backlog=512)
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else str(error)
        way_out = "give an address of this machine" if error.errno == errno.EADDRNOTAVAIL else "choose another port"
        raise RequestError(f"--host {host} --port {port}: {why}; {way_out}") from error


class _Server(uvicorn.Server):
    """uvicorn without its own handling of signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(service: Service, listener: socket.socket, drain_seconds: float) -> None:
    """Serves until a signal: SIGTERM and SIGINT drain, a second one ends at once; SIGHUP replaces the bundles."""
    config = uvicorn.Config(
        service.app(),
        http=protocol(service.settings.deadline),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=math.ceil(service.settings.deadline),
        timeout_graceful_shutdown=GRACE_SECONDS,
    )
    server, models = _Server(config), list(service.models.values())
    tasks: set[asyncio.Task[None]] = set()

    async def drain() -> None:
        log.info("ending: %d requests have %.0f s to finish", service.busy, drain_seconds)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain_seconds):
                while service.busy:
                    await asyncio.sleep(0.05)
        server.should_exit = True

    def end() -> None:
        if service.draining:
            server.should_exit = server.force_exit = True
            return
        service.draining = True
        tasks.add(asyncio.create_task(drain()))

    async def replace() -> None:
        for model in models:  # one after the other: two engines of every model at once would take twice the memory
            await model.replace()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)
    loop.add_signal_handler(signal.SIGHUP, lambda: tasks.add(asyncio.create_task(replace())))
    starting = [asyncio.create_task(model.start()) for model in models]
    try:
        await _first(starting, server)
        if not service.draining:
            host, port = listener.getsockname()[:2]
            name = f"[{host}]" if ":" in host else host
            log.info("ready: http://%s:%d serves %s", name, port, ", ".join(service.models))
            await server.serve([listener])
    finally:
        for task in (*starting, *tasks):
            task.cancel()
        await asyncio.gather(*(model.close() for model in models))


async def _first(starting: Sequence[asyncio.Task[None]], server: uvicorn.Server) -> None:
    """Waits for the engines, unless a signal ends that."""
    waiting = set(starting)
    while waiting and not server.should_exit:
        done, waiting = await asyncio.wait(waiting, timeout=0.1, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()


def read_keys(path: Path) -> tuple[str, ...]:
    """The keys of a file, one a line; RequestError if there is none."""
    try:
        keys = tuple(line.strip() for line in lines_of(read_text(path, 1 << 20)) if line.strip())
    except OSError as error:
        raise RequestError(f"--api-key-file {path}: cannot be read: {error.strerror}") from error
    if not keys or not all(key.isascii() and key.isprintable() and " " not in key for key in keys):
        raise RequestError(f"--api-key-file {path}: expected a key on every line, of printable ASCII without spaces")
    return keys
