"""Means of a section: bundles that are open, their step times on this machine, and texts."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path

import numpy as np

from draftwood.errors import RequestError
from draftwood.planned import StepTime
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.engines.choice import default_engine, open_engine
from draftwood.runtime.engines.engine import Engine
from draftwood.runtime.engines.opening import Opening
from draftwood.runtime.options import Options
from draftwood.runtime.policy import Policies, widest_gear
from draftwood.runtime.speculation.sampling import Sampling
from draftwood.runtime.tuned import bundle_digest, keep_times, tuned_times
from draftwood.threads import default_threads, share_threads
from draftwood.tools.benchmarks.peers import Generate, open_peer
from draftwood.tools.benchmarks.suite import SectionSettings, Suite
from draftwood.tools.measure.conversations import Conversation, by_conversation, long_texts, tokenizer_of
from draftwood.tools.measure.prefilled import Prefilled
from draftwood.tools.measure.tune import tune
from draftwood.tools.prompts import Prompt, read_families

TUNE_SECONDS = 4.0


@dataclass(frozen=True)
class Opened:
    """An engine on one bundle, by its name ``runs``, with the step times that were measured on this machine."""

    engine: Engine
    runs: str
    digest: str
    times: tuple[StepTime, ...]
    # By name; one object serves all texts, as in a server.
    _policies: dict[str, Policies] = field(default_factory=dict)

    def policies(self, name: str) -> Policies:
        """``plain``, ``adaptive``, ``tree`` for the largest one, or a gear by its name."""
        if name not in self._policies:
            self._policies[name] = self._made(name)
        return self._policies[name]

    def _made(self, name: str) -> Policies:
        bundle = self.engine.bundle
        if name == "plain":
            return Policies(bundle, "plain")
        if name == "adaptive":
            return Policies(bundle, "adaptive", times=self.times)
        return Policies(bundle, widest_gear(bundle) if name == "tree" else name)

    def holds(self, ids: Sequence[int], new_tokens: int) -> bool:
        """Whether the context has room for a prompt and its answer."""
        return len(ids) + new_tokens <= self.engine.bundle.manifest.dims.context

    def ids(self, prompt: Prompt) -> list[int]:
        """A prompt, asked first of all, as the bundle reads it."""
        return Conversation(tokenizer_of(self.engine)).ask(prompt)


class Lab:
    """The bench of one process. ``work`` keeps from run to run what other programs read."""

    def __init__(self, suite: Suite, work: Path) -> None:
        self.suite, self.work = suite, work
        work.mkdir(parents=True, exist_ok=True)
        share_threads()
        self._warm: tuple[object, ...] = ()
        self._open: dict[str, Opened] = {}
        self._prefilled: tuple[tuple[object, ...], Prefilled] | None = None
        self._peers: dict[str, Generate | str] = {}

    @cached_property
    def prompts(self) -> list[Prompt]:
        """The suite's prompts."""
        return read_families(self.suite.prompts)

    def conversations(self, limit: int | None) -> list[list[Prompt]]:
        """Prompts by conversation; ``limit`` of them, of every source alike."""
        return by_conversation(self.prompts, limit)

    def opened(self, name: str) -> Opened:
        """The bundle of a name, opened once and timed on this machine."""
        if name not in self._open:
            bundle = Bundle.open(Path(self.suite.bundles[name]))
            runs = self.suite.engine or default_engine(bundle)
            engine = open_engine(bundle, Opening(engine=runs))
            self._open[name] = Opened(engine, runs, bundle_digest(bundle), self._times(engine, runs))
        return self._open[name]

    def prompt(self, number: int, limit: int | None) -> Prompt:
        """The first turn of a conversation, by its number among the ``limit`` that are taken."""
        conversations = self.conversations(limit)
        return conversations[number % len(conversations)][0]

    def warming(self, name: str, options: Options) -> list[int]:
        """The ids of the first prompt that a bundle holds with its answer; RequestError if there is none."""
        opened = self.opened(name)
        for prompt in self.prompts:
            if opened.holds(ids := opened.ids(prompt), options.max_new_tokens):
                return ids
        raise RequestError(f"--bundle {name}: holds no prompt with its answer; give shorter prompts")

    def enters(self, *place: object) -> bool:
        """Whether it is another place than that of the last task, so that its ways have to be warmed up: other work
        has gone through the processor's caches."""
        before, self._warm = self._warm, place
        return before != place

    def options(self, ask: SectionSettings, temperature: float, ignore_eos: bool = True) -> Options:
        """How texts are decoded; with ``ignore_eos`` past the end token, so that all texts weigh the same."""
        sampling = Sampling(temperature=temperature, seed=self.suite.seed)
        return Options(max_new_tokens=ask.max_new_tokens, sampling=sampling, ignore_eos=ignore_eos)

    def text(self, engine: Engine, length: int, number: int) -> tuple[str, list[int]]:
        """The ``number``-th text of a length, from 0; RequestError if the prompts do not make so many."""
        text = next(islice(long_texts(engine, self.prompts, length), number, None), None)
        if text is None:
            what = f"fewer than {number + 1} prompts fit {length} tokens"
            raise RequestError(f"suite {self.suite.name}: {what}; give others as --prompts, or lower the limit")
        return text

    def prefilled(self, opened: Opened, ids: list[int], slots: int) -> Prefilled:
        """A text after its prompt; the last one is kept, as sampling it otherwise needs no other prefill."""
        key = (opened.digest, slots, tuple(ids))
        if self._prefilled is None or self._prefilled[0] != key:
            self._prefilled = key, Prefilled(opened.engine, np.array(ids, np.int64), slots)
        return self._prefilled[1]

    def peer(self, name: str) -> Generate | str:
        """Another program on the teacher's checkpoint, opened once, with as many threads as ours; or why it is not."""
        if name not in self._peers:
            self._peers[name] = open_peer(name, self.checkpoint, self.work, default_threads())
        return self._peers[name]

    @property
    def checkpoint(self) -> Path:
        """The teacher's, which sections that need it have checked to be given."""
        assert self.suite.checkpoint is not None, "what other programs read"
        return Path(self.suite.checkpoint)

    def say(self, what: str) -> None:
        """Tells the user what is being done while nothing is measured."""
        print(what, file=sys.stderr, flush=True)

    def _times(self, engine: Engine, runs: str) -> tuple[StepTime, ...]:
        """Kept in the user's cache: all tasks of a run, and of one that goes on, choose by one table."""
        threads = default_threads()
        times = tuned_times(engine.bundle, runs, threads)
        if not times:
            self.say(f"timing the gears of {engine.bundle.folder.name}")
            times = tuple(tune(engine, TUNE_SECONDS, engine.batches))
            keep_times(engine.bundle, runs, threads, times)
        return times
