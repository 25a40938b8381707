"""A served model whose engines are the replicas of a Ray Serve application, instead of one process."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from typing import cast

import msgspec
from ray import serve
from ray.exceptions import RayActorError, RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from draftwood.errors import BundleError
from draftwood.runtime.engines.opening import Opening
from draftwood.tools.cluster.application import QUIET, application
from draftwood.tools.cluster.connection import here
from draftwood.tools.cluster.replica import Deployed
from draftwood.tools.serve.messages import (
    Ask,
    Cancel,
    Encode,
    Ended,
    EngineArguments,
    Failed,
    OfText,
    Reading,
    Ready,
    ToEngine,
    ToServer,
)
from draftwood.tools.serve.metrics import ModelMetrics
from draftwood.tools.serve.model import LOST, Full, Mailbox, ServedModel
from draftwood.tools.serve.process import EngineProcess

# Between looks at the replicas.
WATCH_SECONDS = 1.0
PATIENCE_SECONDS = 10.0

log = logging.getLogger("draftwood.serve")

_letters = msgspec.msgpack.Decoder(list[OfText])


class Replicas:
    """All engines of an application, spoken to as if they were one."""

    def __init__(self, deployed: Deployed, handle: DeploymentHandle, ready: Ready) -> None:
        self.deployed, self.ready, self.alive = deployed, ready, True
        self.lost: set[str] = set()
        self._handle = handle.options(stream=True, method_name="answer")
        self._tasks: dict[int, asyncio.Task[None]] = {}

    @classmethod
    async def start(cls, deployed: Deployed) -> Replicas:
        """Waits until the replicas are proved and warm. An application that runs already is taken as it is.

        Raises:
            BundleError: they do not start; the cause is in Ray's log.
        """
        try:
            handle = await asyncio.to_thread(_run, deployed)
            facts = await handle.facts.remote()
        except (RuntimeError, RayServeException) as error:
            last = str(error).strip().splitlines()[-1:]
            raise BundleError(f"{deployed.bundle}: its replicas do not start: {''.join(last)}") from error
        return cls(deployed, handle, msgspec.msgpack.decode(facts, type=Ready))

    def listen(self, receive: Callable[[ToServer], None], lost: Callable[[], None]) -> None:
        """Hands on the engines' messages. They are not lost all at once: Ray replaces each."""
        self._receive = receive

    def send(self, message: ToEngine) -> None:
        if isinstance(message, Cancel):
            if (task := self._tasks.get(message.id)) is not None:
                task.cancel()
            return
        self._tasks[message.id] = asyncio.create_task(self._follow(message))

    async def _follow(self, message: Ask | Encode) -> None:
        """One text to its end, of any kind; from the beginning if a replica dies before it has begun."""
        try:
            if not await self._ask(message, again=True):
                await self._ask(message, again=False)
        except Exception as error:  # Ray's own errors are many, and a text has to end
            log.error("a replica failed: %s", error)
            self._receive(Failed(message.id, f"the engine failed: {type(error).__name__}"))
        finally:
            del self._tasks[message.id]

    async def _ask(self, message: Ask | Encode, again: bool) -> bool:
        """Whether the text came to an end; else it may be asked for again. Its replica then ended before the text
        began, and not while prompt and grammar were read, which may have ended the replica."""
        unharmed = again
        session = message.session if isinstance(message, Ask) else ""
        response = self._handle.options(session_id=session).remote(msgspec.msgpack.encode(message))
        try:
            async for content in response:
                for letter in _letters.decode(content):
                    unharmed = again and isinstance(letter, Reading) and letter.done
                    letter.id = message.id
                    self._receive(letter)
        except asyncio.CancelledError:
            response.cancel()
            self._receive(Ended(message.id, "cancelled"))
        except RayActorError as error:
            self.lost.add(error.actor_id)
            log.error("a replica ended: %s", str(error).partition("\n")[0])
            if not unharmed:
                self._receive(Failed(message.id, LOST))
            return not unharmed
        return True

    def running(self) -> int:
        """Replicas that are there now; 0 also if Serve does not say."""
        try:
            (deployment,) = serve.status().applications[self.deployed.name].deployments.values()
            # A controller that was started again finds them anew, and until it has they are "recovering".
            return sum(deployment.replica_states.get(state, 0) for state in ("RUNNING", "RECOVERING"))
        except (KeyError, ValueError, RayError, RayServeException):
            return 0


def _run(deployed: Deployed) -> DeploymentHandle:
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    serve.start(proxy_location="Disabled", logging_config=QUIET)
    running = serve.status().applications.get(deployed.name)
    if running is not None and running.status == "RUNNING":
        return serve.get_app_handle(deployed.name)
    return serve.run(application(msgspec.to_builtins(deployed)), name=deployed.name, route_prefix=None)


class RayModel(ServedModel):
    """One bundle under one name, decoded by as many replicas as there are.

    Texts beyond the room of all replicas, and beyond those that may wait, are refused. Those beyond the room of the
    present replicas wait in Serve's router, which sees by them that more are needed.
    """

    def __init__(self, name: str, deployed: Deployed, waiting: int, metrics: ModelMetrics) -> None:
        self._deployed = deployed
        self._places = deployed.texts * deployed.most_replicas
        opening = Opening(waiting=self._places + waiting)
        super().__init__(name, EngineArguments(bundle=deployed.bundle, opening=opening), metrics)
        self._watching: asyncio.Task[None] | None = None

    @property
    def cache_usage(self) -> float:
        """Share of the texts that all replicas take; each knows its own memory alone."""
        return min(self.running / self._places, 1.0)

    def submit(self, asks: list[Ask], receiver: Mailbox) -> None:
        if self.busy + len(asks) > self.most_waiting:
            raise Full
        super().submit(asks, receiver)

    async def start(self) -> None:
        """The application, and a look at it from time to time; BundleError if it does not start."""
        replicas = await Replicas.start(self._deployed)
        self._take(cast(EngineProcess, replicas))
        self._watching = asyncio.create_task(self._watch(replicas))

    async def _watch(self, replicas: Replicas) -> None:
        """Tells health and metrics how many replicas run, and that Ray has started others."""
        looking: asyncio.Future[int] | None = None
        while await asyncio.to_thread(here):
            looking = looking or asyncio.ensure_future(asyncio.to_thread(replicas.running))
            await asyncio.wait([looking], timeout=PATIENCE_SECONDS)  # Serve's answer may never come
            running, looking = (looking.result(), None) if looking.done() else (0, looking)
            if not running or not replicas.alive:
                log.log(logging.INFO if running else logging.ERROR, "%s: %d replicas run", self.name, running)
            replicas.alive = running > 0
            self.metrics.up(replicas.alive)
            for _ in range(len(replicas.lost) - self.restarts):
                self.restarts += 1
                self.metrics.restarted()
            for text in list(self._texts.values()):
                self._hand(text)
            await asyncio.sleep(WATCH_SECONDS)
        self._stranded(replicas)

    def _stranded(self, replicas: Replicas) -> None:
        """Without this machine's Ray nothing is answered any more, and no other can be started in this process."""
        log.error("%s: Ray on this machine has ended, and with it ends this server", self.name)
        replicas.alive = False
        self.metrics.up(False)
        for text in list(self._texts.values()):
            self._receive(cast(EngineProcess, replicas), Failed(text.ask.id, LOST))
        signal.raise_signal(signal.SIGTERM)

    async def replace(self) -> None:
        """Not here: another bundle is another deployment."""
        log.error("%s: not replaced; deploy the other bundle, then end this one", self.name)

    async def close(self) -> None:
        """Ends the spectators. The replicas end with Ray, or stay with a cluster of others."""
        if self._watching is not None:
            self._watching.cancel()
