"""An engine's process as the server sees it: started, spoken to, and its end noticed."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import Callable

import msgspec

from draftwood.errors import BundleError
from draftwood.tools.serve import messages
from draftwood.tools.serve.messages import EngineArguments, Ready, ToEngine, ToServer

# Between a polite end (the socket closed) and a kill.
END_SECONDS = 2.0


class EngineProcess:
    """One run of a bundle's engine. ``receive`` gets every message, ``lost`` once that there will be no more."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        ready: Ready,
    ) -> None:
        self.ready, self.alive = ready, True
        self._process, self._reader, self._writer = process, reader, writer
        self._reading: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, arguments: EngineArguments) -> EngineProcess:
        """Waits until the bundle is proved and warm; ``listen`` then begins.

        Raises:
            BundleError: there can be no process, or it ended before that; what was wrong is on stderr.
        """
        ours, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as failing:
            failing.callback(ours.close)
            try:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-P", "-m", "draftwood.tools.serve.worker", str(theirs.fileno())),
                    msgspec.json.encode(arguments),
                    pass_fds=[theirs.fileno()],
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.DEVNULL,
                    start_new_session=True,  # an interrupt at the terminal is for the server, which drains
                )
            except OSError as error:
                raise BundleError(
                    f"{arguments.bundle}: no process can be started for its engine: {error.strerror}; raise the limit"
                    " of processes (ulimit -u, a container's pids) or of memory"
                ) from error
            failing.pop_all()
        reader, writer = await asyncio.open_connection(sock=ours)
        try:
            ready = await _read(reader)
        except BaseException:
            process.kill()
            raise
        if not isinstance(ready, Ready):
            await process.wait()
            raise BundleError(f"{arguments.bundle}: its engine did not start (exit code {process.returncode})")
        return cls(process, reader, writer, ready)

    @property
    def pid(self) -> int:
        return self._process.pid

    def listen(self, receive: Callable[[ToServer], None], lost: Callable[[], None]) -> None:
        """Hands on the engine's messages from now on."""

        async def read() -> None:
            while (message := await _read(self._reader)) is not None:
                receive(message)
            self.alive = False
            lost()
            await self.stop()

        self._reading = asyncio.create_task(read())

    def send(self, message: ToEngine) -> None:
        """Never waits: an engine reads at once, and a request is small."""
        self._writer.write(messages.framed(message))

    async def stop(self) -> None:
        """Ends the process; texts that it decodes are lost."""
        self.alive = False
        self._writer.close()
        try:
            await asyncio.wait_for(self._process.wait(), END_SECONDS)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()


async def _read(reader: asyncio.StreamReader) -> ToServer | None:
    """The next message; None if the engine has ended."""
    try:
        head = await reader.readexactly(messages.HEAD_BYTES)
        return messages.decode_for_server(await reader.readexactly(int.from_bytes(head, "big")))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
