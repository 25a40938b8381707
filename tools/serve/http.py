"""Between HTTP and the service: bodies with bounds, answers that stop when nobody reads them, deadlines."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from http import HTTPStatus
from typing import Any, TypeVar

import h11
import msgspec
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from draftwood.tools.serve.completions import event
from draftwood.tools.serve.errors import RequestRefused

_Given = TypeVar("_Given")

# A reader who takes nothing for so long is gone.
SLOW_READER_SECONDS = 60.0


class Gone(Exception):
    """The client has closed its connection."""


async def read_body(scope: Scope, receive: Receive, most: int, seconds: float) -> bytes:
    """The body of a request, chunked or not.

    Raises:
        RequestRefused: it is not JSON by its type, compressed, too large, or too slow.
        Gone: the client is.
    """
    headers = dict(scope["headers"])
    # A page of another origin can send any other type without the browser asking us first.
    if headers.get(b"content-type", b"").partition(b";")[0].strip().lower() != b"application/json":
        raise RequestRefused("content-type: expected application/json", status=415)
    coding = headers.get(b"content-encoding", b"identity").decode("latin-1")
    if coding.lower() != "identity":
        raise RequestRefused(f"content-encoding: expected a body as it is, got {coding:.40}", status=415)
    size = headers.get(b"content-length", b"0")
    if size.isdigit() and int(size) > most:
        raise _too_large(most)
    try:
        async with asyncio.timeout(seconds):
            return await _read(receive, most)
    except TimeoutError:
        raise RequestRefused(f"the body did not come within {seconds:.0f} s", status=408) from None


async def _read(receive: Receive, most: int) -> bytes:
    parts, size, more = [], 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Gone
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > most:
            raise _too_large(most)
        more = message.get("more_body", False)
    return b"".join(parts)


def _too_large(most: int) -> RequestRefused:
    return RequestRefused(f"the body is larger than the {most} bytes that this server takes", status=413)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, _Given]) -> _Given:
    """The result of the work; once the client is gone it is cancelled, which frees the room of its texts.

    Raises:
        Gone: the client is.
    """
    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Gone
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_events(chunks: AsyncGenerator[bytes, None], headers: dict[str, str], send: Send) -> None:
    """An answer of server-sent events; RequestRefused while nothing has been sent, a later one is the last event."""
    more = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-store"}
    more["x-accel-buffering"] = "no"  # nginx would hold chunks back
    start = [(name.encode(), value.encode("latin-1")) for name, value in (more | headers).items()]
    started = False
    async with aclosing(chunks):
        try:
            async for chunk in chunks:
                if not started:
                    started = True
                    await _soon(send, {"type": "http.response.start", "status": 200, "headers": start})
                await _soon(send, {"type": "http.response.body", "body": chunk, "more_body": True})
        except RequestRefused as error:
            if not started:
                raise
            await _soon(send, {"type": "http.response.body", "body": event(error.body), "more_body": True})
    await _soon(send, {"type": "http.response.body", "body": b"", "more_body": False})


async def _soon(send: Send, message: Message) -> None:
    try:
        async with asyncio.timeout(SLOW_READER_SECONDS):
            await send(message)
    except TimeoutError:
        raise Gone from None


def protocol(seconds: float) -> type[H11Protocol]:
    """uvicorn's protocol with two additions: a connection whose request does not become whole in time is closed, and a
    client that sends no valid request reads why."""

    class Deadline(H11Protocol):
        _deadline: asyncio.TimerHandle | None = None
        _refused = False

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._watch()

        def data_received(self, data: bytes) -> None:
            if self._refused:
                return
            super().data_received(data)
            if not self._refused:  # else the deadline is that of its answer
                self._watch()

        def send_400_response(self, msg: str) -> None:
            """Answers with the error's status, 431 for headers that are too large. Closing while more arrives would
            reset the connection and lose the answer. So the rest is read and dropped until the deadline."""
            error = sys.exception()
            status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
            refused = RequestRefused(f"{msg.rstrip('.')}: {HTTPStatus(status).phrase}", status=status)
            content = msgspec.json.encode(refused.body)
            headers = [("content-type", "application/json"), ("content-length", str(len(content)))]
            for part in (
                h11.Response(status_code=status, headers=[*headers, ("connection", "close")]),
                h11.Data(data=content),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(part) or b"")
            self._refused = True
            self.transport.write_eof()
            self._forget()
            self._deadline = self.loop.call_later(seconds, self.transport.abort)

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._watch()

        def connection_lost(self, exc: Exception | None) -> None:
            self._forget()
            super().connection_lost(exc)

        def _watch(self) -> None:
            """The clock runs from the first moment at which a request is waited for to its last byte."""
            if self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
                if self._deadline is None:
                    self._deadline = self.loop.call_later(seconds, self.transport.abort)
            else:
                self._forget()

        def _forget(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

    return Deadline
