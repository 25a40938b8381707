"""What a section measures with: bundles that are open, their step times on this machine, and texts."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path

import numpy as np

from draftwood.compiler.teachers.kept import Precision
from draftwood.errors import RequestError
from draftwood.planned import StepTime
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.decoding import Options
from draftwood.runtime.engines import Engine, StagedEngine, default_engine, open_engine
from draftwood.runtime.engines.sessions import share_threads
from draftwood.runtime.policy import Policies, widest_gear
from draftwood.runtime.policy.tuned import bundle_digest, keep_times, tuned_times
from draftwood.runtime.speculation.sampling import Sampling
from draftwood.tools import demo
from draftwood.tools.demo import counted
from draftwood.tools.demo.sizes import models
from draftwood.tools.lab import bundles
from draftwood.tools.lab.conversations import Conversation, by_conversation, long_texts, tokenizer_of
from draftwood.tools.lab.given import own_trees
from draftwood.tools.lab.peers import Generate, open_peer
from draftwood.tools.lab.prefilled import Prefilled
from draftwood.tools.lab.suite import Ask, Suite
from draftwood.tools.lab.timer import best_fixed, tune
from draftwood.tools.prompts import Prompt, read_families

TUNE_SECONDS = 4.0


@dataclass(frozen=True)
class Opened:
    """An engine on one bundle, by its name ``runs``, with the step times that were measured on this machine."""

    engine: StagedEngine
    runs: str
    drafter: str
    digest: str
    times: tuple[StepTime, ...]
    # The same bundle on other engines, by their names.
    others: dict[str, Engine] = field(default_factory=dict)
    # By name; one serves all texts, as that of a model that is served does.
    _policies: dict[str, Policies] = field(default_factory=dict)

    def policies(self, name: str) -> Policies:
        """``plain``, ``adaptive``, ``tree`` for the one that promises most, or a gear by its name."""
        if name not in self._policies:
            self._policies[name] = self._made(name)
        return self._policies[name]

    def _made(self, name: str) -> Policies:
        bundle = self.engine.bundle
        if name == "plain":
            return Policies(bundle, "plain")
        if name == "adaptive":
            return Policies(bundle, "adaptive", times=self.times)
        return Policies(bundle, self.tree if name == "tree" else name)

    @cached_property
    def tree(self) -> str:
        """The gear of the fixed tree that promises most; of a bundle of one's own, of which nothing was counted, the
        largest."""
        if self.drafter not in demo.ALL_DRAFTERS:
            return widest_gear(self.engine.bundle)
        return best_fixed(self.engine.bundle, counted(self.drafter, sampled=False).rank_paths(), self.times)

    def ids(self, prompt: Prompt) -> list[int]:
        """A prompt, asked first of all, as the bundle reads it."""
        return Conversation(tokenizer_of(self.engine)).ask(prompt)


class Lab:
    """The bench of one process. ``work`` keeps widened models and bundles from run to run."""

    def __init__(self, suite: Suite, work: Path) -> None:
        self.suite, self.work = suite, work
        work.mkdir(parents=True, exist_ok=True)
        share_threads()
        self._warm: tuple[object, ...] = ()
        self._open: dict[tuple[object, ...], Opened] = {}
        self._prefilled: tuple[tuple[object, ...], Prefilled] | None = None
        self._peers: dict[tuple[str, str], Generate | str] = {}

    @cached_property
    def prompts(self) -> list[Prompt]:
        """The suite's prompts."""
        return read_families(self.suite.prompts)

    def conversations(self, limit: int | None) -> list[list[Prompt]]:
        """Prompts by conversation; ``limit`` of them, of every source alike."""
        return by_conversation(self.prompts, limit)

    def planned(self, size: str, drafter: str, texts: int = 1, precision: Precision | None = None) -> Opened:
        """The pair with planned trees, tuned on this machine; one bundle for all sections of the suite, but for those
        in which ``texts`` share a launch, or whose teacher is in four bits, kept in a ``precision``.

        Where bundles were given, the one of the drafter's name.
        """

        def bundle() -> Bundle:
            if drafter in self.suite.bundles:
                return Bundle.open(Path(self.suite.bundles[drafter]))
            made = bundles.planned_bundle(size, drafter, self._reach, self.work, self.say, texts, precision)
            return Bundle.open(made)

        return self._opened(("planned", size, drafter, texts, precision), bundle, tuned=True)

    @property
    def _reach(self) -> int:
        """Tokens of the longest text that any section asks for."""
        return max(max(ask.lengths, default=0) + ask.max_new_tokens for ask in self.suite.sections.values())

    def trees(self, size: str, drafter: str, trees: bundles.Trees, reach: int = 0) -> Opened:
        """The pair with ``trees``, not tuned; those of a drafter that ranks levels need no build of their own.

        A bundle that was given has the trees that it has.
        """
        if drafter in self.suite.bundles:
            return self.planned(size, drafter)

        def bundle() -> Bundle:
            found = Bundle.open(bundles.tree_bundle(size, drafter, reach, trees, self.work, self.say))
            return found if demo.follows_nodes(drafter) else bundles.with_trees(found, trees)

        return self._opened(("trees", size, drafter, bundles.kv_lengths(reach), trees), bundle, tuned=False)

    def own_names(self, drafter: str) -> dict[str, str]:
        """What a bundle that was given calls its trees, by M and D; nothing of a demo pair."""
        return own_trees(self.suite.bundles[drafter])[1] if drafter in self.suite.bundles else {}

    def on(self, opened: Opened, engine: str) -> Engine:
        """The bundle on another engine, opened once; its own is there already."""
        if engine == opened.runs:
            return opened.engine
        if engine not in opened.others:
            opened.others[engine] = open_engine(opened.engine.bundle, engine)
        return opened.others[engine]

    def windowed(self, size: str, drafter: str, window: int, reach: int) -> Opened:
        """The pair whose drafter sees ``window`` tokens; 0 for all."""

        def bundle() -> Bundle:
            return Bundle.open(bundles.windowed_bundle(size, drafter, reach, window, self.work, self.say))

        return self._opened(("window", size, drafter, window), bundle, tuned=False)

    def prompt(self, number: int, limit: int | None) -> Prompt:
        """The first turn of a conversation, by its number among the ``limit`` that are taken."""
        own = self.conversations(limit)
        return own[number % len(own)][0]

    def enters(self, *place: object) -> bool:
        """Whether it is another place than that of the last task, so that its ways have to be warmed up: other work
        has gone through the processor's caches."""
        before, self._warm = self._warm, place
        return before != place

    def options(self, ask: Ask, temperature: float, ignore_eos: bool = True) -> Options:
        """How texts are decoded; past the end token where all texts shall weigh the same."""
        sampling = Sampling(temperature=temperature, seed=self.suite.seed)
        return Options(max_new_tokens=ask.max_new_tokens, sampling=sampling, ignore_eos=ignore_eos)

    def text(self, engine: Engine, length: int, number: int) -> tuple[str, list[int]]:
        """The ``number``-th text of a length, from 0; RequestError where the prompts do not make so many."""
        found = next(islice(long_texts(engine, self.prompts, length), number, None), None)
        if found is None:
            what = f"fewer than {number + 1} prompts fit {length} tokens"
            raise RequestError(f"suite {self.suite.name}: {what}; give others as --prompts, or lower the limit")
        return found

    def prefilled(self, opened: Opened, ids: list[int], slots: int) -> Prefilled:
        """A text behind its prompt; the last one is kept, as sampling it otherwise needs no other prefill."""
        key = (opened.digest, slots, tuple(ids))
        if self._prefilled is None or self._prefilled[0] != key:
            self._prefilled = key, Prefilled(opened.engine, np.array(ids, np.int64), slots)
        return self._prefilled[1]

    def peer(self, size: str, name: str) -> Generate | str:
        """Another program on the teacher of a size, opened once, with as many threads as ours; or why it is not."""
        if (size, name) not in self._peers:
            threads = len(os.sched_getaffinity(0))
            self._peers[size, name] = open_peer(name, self.teacher(size), self.work, threads)
        return self._peers[size, name]

    def teacher(self, size: str) -> Path:
        """The checkpoint of a size."""
        return models(size, self.work, demo.DRAFTERS[0])[0]

    def say(self, what: str) -> None:
        """Tells the user what is done now, where it is no measurement."""
        print(what, file=sys.stderr, flush=True)

    def _opened(self, key: tuple[object, ...], make: Callable[[], Bundle], tuned: bool) -> Opened:
        if key not in self._open:
            # One size at a time, or the memory of a large one would be held beside the next.
            self._open = {held: one for held, one in self._open.items() if held[1] == key[1]}
            bundle = make()
            runs = self.suite.engine or default_engine(bundle)
            engine = open_engine(bundle, runs)
            assert isinstance(engine, StagedEngine), "every engine of ours has a step's parts"
            times = self._times(engine, runs) if tuned else ()
            self._open[key] = Opened(engine, runs, str(key[2]), bundle_digest(bundle), times)
        return self._open[key]

    def _times(self, engine: StagedEngine, runs: str) -> tuple[StepTime, ...]:
        """Kept in the user's cache: all tasks of a run, and of one that goes on, choose by one table."""
        threads = len(os.sched_getaffinity(0))
        kept = tuned_times(engine.bundle, runs, threads)
        if not kept:
            self.say(f"timing the gears of {engine.bundle.folder.name}")
            kept = tuple(tune(engine, TUNE_SECONDS, engine.batches))
            keep_times(engine.bundle, runs, threads, kept)
        return kept
