"""A replica: one engine that other machines can ask. Imports nothing of Ray, which makes actors of it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import AsyncIterator
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from draftwood.errors import BundleError
from draftwood.runtime.engines.opening import USUAL, Opening
from draftwood.tools.serve import messages
from draftwood.tools.serve.messages import CacheUse, Cancel, Encoded, EngineArguments, Last, Ready, ToServer
from draftwood.tools.serve.model import Mailbox
from draftwood.tools.serve.process import EngineProcess


class Deployed(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of an application. Every machine has the bundle at the same path."""

    bundle: str
    # SHA-256 of its manifest, which names all other files by theirs: a replica refuses another bundle.
    manifest: str
    replicas: int = 1
    # Above ``replicas`` their number follows the texts that are asked for.
    most_replicas: int = 1
    # That a replica takes at the same time.
    texts: int = 8
    # How a replica opens it; the engine's threads, one if they are left out, are the replica's processors.
    opening: Opening = USUAL

    @property
    def threads(self) -> int:
        """Processors of a replica."""
        return self.opening.threads or 1

    @property
    def name(self) -> str:
        """The application's name: equal deployments have equal names."""
        return f"draftwood-{hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:16]}"


def manifest_digest(bundle: Path) -> str:
    """SHA-256 of a bundle's manifest; BundleError if there is none."""
    try:
        return hashlib.sha256((bundle / "manifest.json").read_bytes()).hexdigest()
    except OSError as error:
        raise BundleError(f"{bundle}: its manifest.json cannot be read: {error.strerror}") from error


class Replica:
    """One engine, in a process below this one. If either ends the other does, and Ray starts another replica."""

    async def __init__(self, given: dict[str, Any]) -> None:  # type: ignore[misc]
        deployed = msgspec.convert(given, Deployed)
        bundle = Path(deployed.bundle)
        if manifest_digest(bundle) != deployed.manifest:
            raise BundleError(f"{bundle}: on this machine it is another bundle than the one that is deployed; copy it")
        opening = replace(deployed.opening, waiting=deployed.texts, threads=deployed.threads)
        self._boxes: dict[int, Mailbox] = {}
        self._ids = count(1)
        self._process = await EngineProcess.start(EngineArguments(bundle=deployed.bundle, opening=opening))
        self._process.listen(self._receive, lambda: os._exit(1))

    def _receive(self, message: ToServer) -> None:
        if not isinstance(message, Ready | CacheUse) and (box := self._boxes.get(message.id)) is not None:
            box.put(0, message)

    async def facts(self) -> bytes:
        """The engine's facts, as MessagePack."""
        return msgspec.msgpack.encode(self._process.ready)

    async def answer(self, content: bytes) -> AsyncIterator[bytes]:
        """The engine's messages about one text or prompt, as they come: MessagePack, a list at a time.

        A generator that is closed early, since its reader is gone, drops the text.
        """
        message = messages.decode_for_engine(content)
        message.id = next(self._ids)
        box = self._boxes[message.id] = Mailbox()
        last: ToServer | None = None
        self._process.send(message)
        try:
            while not isinstance(last, Last | Encoded):
                letters = [letter for _, letter in await box.take()]
                last = letters[-1]
                yield msgspec.msgpack.encode(letters)
        finally:
            del self._boxes[message.id]
            if not isinstance(last, Last | Encoded):
                self._process.send(Cancel(message.id))
