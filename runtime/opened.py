"""A bundle that is ready to answer: the result of ``draftwood.open``."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from draftwood.errors import RequestError, UserError
from draftwood.manifest import Manifest
from draftwood.planned import StepTime
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.caches import Caches
from draftwood.runtime.decoding import Decoding, Result
from draftwood.runtime.engines.choice import default_engine, host_engine
from draftwood.runtime.engines.engine import Engine
from draftwood.runtime.engines.opening import USUAL, Opening
from draftwood.runtime.options import Asked, Options
from draftwood.runtime.policy import Policies, Policy
from draftwood.runtime.proving import proved_engine
from draftwood.runtime.sharing import Figures, Sharing
from draftwood.runtime.speculation.apart import ApartGrammar
from draftwood.runtime.trace import Trace
from draftwood.runtime.tuned import tuned_times

# Threads of asyncio's texts that take steps, and as many of those that may wait for room; others wait for a thread.
ASYNC_THREADS = 64

_Given = TypeVar("_Given")

# Text to continue; a chat, as messages or as an object with tools and switches too; or token ids.
Prompt = str | Sequence[Mapping[str, Any]] | Mapping[str, Any] | Sequence[int] | NDArray[np.integer[Any]]


class OpenedBundle:
    """A verified bundle on an engine. A context manager; may be used from several threads at once.

    A text for a prompt, a sampling and a seed is always the same, next to any other texts. Only if the teacher's own
    decision is closer than rounding, ``adaptive``, which goes by measured time, may come to either token.

    Example:
        >>> with draftwood.open("bundle") as model:  # doctest: +SKIP
        ...     print(model.generate("Once upon a time", max_new_tokens=32).text)
    """

    def __init__(
        self,
        bundle: Bundle,
        engine: Engine,
        opening: Opening = USUAL,
        times: Sequence[StepTime] = (),
        refused: str | None = None,
    ) -> None:
        self.bundle, self.engine, self._times = bundle, engine, times
        # The engine that decodes, and why another one that was asked for does not.
        self.engine_name, self.refused = opening.engine or "", refused
        self._policies: dict[str, Policies] = {}
        self._sharing = Sharing(engine, Caches(engine, opening.cache_bytes, opening.prefixes), opening.waiting)
        # Of asyncio's texts: those for steps, and those that may wait for room.
        self._threads: tuple[ThreadPoolExecutor, ThreadPoolExecutor] | None = None
        self._closed = False
        if bundle.tokenizer is not None:
            bundle.tokenizer.warm()

    @property
    def manifest(self) -> Manifest:
        """The bundle's manifest."""
        return self.bundle.manifest

    def generate(
        self,
        prompt: Prompt,
        *,
        policy: str | Policy = "adaptive",
        trace: Trace | None = None,
        **options: Unpack[Asked],
    ) -> Result:
        """Answers a prompt.

        Args:
            prompt: text to continue, chat messages (each with ``role`` and ``content``), an object with ``messages``,
                ``tools``, ``documents`` and ``chat_template_kwargs``, or token ids.
            policy, trace, options: as ``stream`` takes them.

        Raises:
            RequestError: a prompt or an option that the bundle cannot serve.
            BusyError: as many texts wait for room as may (``waiting`` of ``draftwood.open``).
            NumericError: the teacher's logits are not finite.
        """
        return self.stream(prompt, policy=policy, trace=trace, **options).run()

    def stream(
        self,
        prompt: Prompt,
        *,
        policy: str | Policy = "adaptive",
        trace: Trace | None = None,
        held: ApartGrammar | None = None,
        continued: bool | None = None,
        **options: Unpack[Asked],
    ) -> Decoding:
        """Begins to answer a prompt: iterate over it for pieces of text; ``result`` is set at its end.

        Args:
            prompt: as ``generate`` takes it.
            policy: ``adaptive`` (the default), ``plain``, a gear's name for always its tree, or a policy
                of one's own, made for this text.
            trace: takes an event a step; a new one for each text.
            held: the grammar of the options, if it has been compiled in a process of its own.
            continued: whether the answer goes on with the prompt's own text; None: as `continues` says.
            options: ``max_new_tokens``, ``temperature``, ``top_p``, ``top_k``, ``seed``, ``stop``, ``ignore_eos``,
                ``logprobs``, ``grammar`` and others, described at `draftwood.runtime.options.Asked`.
        """
        self._check_open()
        chosen = Options.of(**options)
        chosen = chosen if held is None else dataclasses.replace(chosen, grammar=held)
        _check_kinds(policy, trace)
        if isinstance(policy, str):
            restricted = chosen.grammar is not None
            policy = self._policies_of(policy).new(chosen.sampling.greedy, chosen.max_new_tokens, restricted)
        ids = prompt_ids(self.bundle, prompt)
        goes_on = continues(prompt) if continued is None else continued
        return Decoding(self.engine, ids, chosen, policy, trace, self._sharing, goes_on)

    def figures(self) -> Figures:
        """The state of its texts and the size of their caches, as a page of metrics shows them. Any thread may ask."""
        return self._sharing.figures()

    async def agenerate(
        self,
        prompt: Prompt,
        *,
        policy: str | Policy = "adaptive",
        trace: Trace | None = None,
        **options: Unpack[Asked],
    ) -> Result:
        """``generate`` for programs on asyncio, with the same arguments; their texts share launches, too.

        Cancelling it ends the text within a step.
        """
        stream = await self._apart(partial(self.stream, prompt, policy=policy, trace=trace, **options))
        try:
            return await self._apart(stream.run, waits=True)
        finally:
            stream.cancel()

    async def astream(
        self,
        prompt: Prompt,
        *,
        policy: str | Policy = "adaptive",
        trace: Trace | None = None,
        **options: Unpack[Asked],
    ) -> AsyncGenerator[str, None]:
        """``stream`` for programs on asyncio: pieces of text as they come. Closing it ends the text within a step."""
        stream = await self._apart(partial(self.stream, prompt, policy=policy, trace=trace, **options))
        pieces = iter(stream)
        try:
            yield await self._apart(partial(next, pieces), waits=True)
            while (piece := await self._apart(partial(next, pieces, None))) is not None:
                yield piece
        finally:
            stream.cancel()

    async def _apart(self, call: Callable[[], _Given], waits: bool = False) -> _Given:
        """The result of a call, in its own thread. One that ``waits`` for room takes no thread of those by whose steps
        room comes."""
        import asyncio  # a program that calls it has loaded it; others need not

        self._check_open()
        if self._threads is None:
            steps, waiting = (ThreadPoolExecutor(ASYNC_THREADS, f"draftwood-{name}") for name in ("steps", "waiting"))
            self._threads = (steps, waiting)
        return await asyncio.get_running_loop().run_in_executor(self._threads[waits], call)

    def _check_open(self) -> None:
        if self._closed:
            raise RequestError(f"{self.bundle.folder}: is closed; open it again")

    def _policies_of(self, name: str) -> Policies:
        """By a policy's name or a gear's; made once, for their tables are shared by all texts."""
        policies = self._policies.get(name)
        return policies or self._policies.setdefault(
            name, Policies(self.bundle, name, self._times)
        )  # one for all threads

    def close(self) -> None:
        """Closes the engine; a step that runs ends first; a text that goes on, or waits for room, is refused. May be
        called twice."""
        if not self._closed:
            self._closed = True
            self.engine.close()
            self._sharing.close()
            for threads in self._threads or ():
                threads.shutdown(wait=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def open_bundle(folder: Path, opening: Opening) -> OpenedBundle:
    """Opens a bundle and proves that it holds together; see ``draftwood.open``."""
    bundle = Bundle.open(folder, opening.verify)
    # The tokenizer is read while onnxruntime opens graphs, which holds no lock of Python's.
    with ThreadPoolExecutor(1, "draftwood-tokenizer") as apart:
        tokenizer = apart.submit(getattr, bundle, "tokenizer")
        engine, name, refused = _engine(bundle, opening)
        tokenizer.result()
    times = tuned_times(bundle, name, opening.threads)
    return OpenedBundle(bundle, engine, replace(opening, engine=name), times, refused)


def _engine(bundle: Bundle, opening: Opening) -> tuple[Engine, str, str | None]:
    """The engine, its name, and why it is not the one that was asked for."""
    name = opening.engine or default_engine(bundle)
    try:
        return proved_engine(bundle, replace(opening, engine=name)), name, None
    except (UserError, RuntimeError) as error:  # an operator that a device lacks is torch's own error
        if not opening.fallback or name == (other := host_engine(bundle)):
            raise
        reason = str(error).strip().partition("\n")[0]
        refused = reason if reason.startswith("--engine") else f"--engine {name}: {reason}"
        return proved_engine(bundle, replace(opening, engine=other)), other, refused


def _check_kinds(policy: object, trace: object) -> None:
    """Raises RequestError if one cannot be used: a text would find out at its first step, or only its reader."""
    if not isinstance(policy, str | Policy) or isinstance(policy, type):
        raise RequestError(f"policy: expected adaptive, plain, a gear's name or a Policy, got {type(policy).__name__}")
    if not isinstance(trace, Trace | None):
        raise RequestError(f"trace: expected a Trace, got {type(trace).__name__}")
    if trace is not None:
        trace.check_new()


def continues(prompt: Prompt) -> bool:
    """Whether an answer goes on with a prompt's own text: with any but a chat in which a turn begins."""
    if isinstance(prompt, Mapping):
        return prompt.get("continue_final_message") is True
    return isinstance(prompt, str) or not any(isinstance(part, Mapping) for part in prompt)


def prompt_ids(bundle: Bundle, prompt: Prompt) -> list[int]:
    """Token ids of a prompt in any of its forms; RequestError if it is none, or the bundle has no tokenizer."""
    prompt = prompt.tolist() if isinstance(prompt, np.ndarray) else prompt
    if not isinstance(prompt, str | Sequence | Mapping) or isinstance(prompt, bytes | bytearray | memoryview):
        raise RequestError(f"prompt: expected text, chat messages or token ids, got {type(prompt).__name__}")
    if not isinstance(prompt, str | Mapping) and all(
        isinstance(part, int | np.integer) and not isinstance(part, bool) for part in prompt
    ):
        return [int(part) for part in prompt]  # type: ignore[arg-type]
    if bundle.tokenizer is None:
        raise RequestError(f"{bundle.folder}: has no tokenizer; give the prompt as token ids")
    if isinstance(prompt, str):
        return bundle.tokenizer.encode(prompt)
    return bundle.tokenizer.chat(prompt if isinstance(prompt, Mapping) else list(prompt))
