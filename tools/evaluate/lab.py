"""What a section measures with: bundles that are open, their step times on this machine, and texts."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path

import numpy as np

from draftwood.errors import RequestError
from draftwood.planned import StepTime
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.engines import Engine, open_engine
from draftwood.runtime.engines.bitwise import BitwiseEngine
from draftwood.runtime.engines.cpu import CpuEngine
from draftwood.runtime.engines.sessions import share_threads
from draftwood.runtime.policy import Policies
from draftwood.runtime.policy.tuned import bundle_digest, keep_times, tuned_times
from draftwood.tools import demo
from draftwood.tools.demo import counted
from draftwood.tools.demo.sizes import models
from draftwood.tools.documents import behind_documents
from draftwood.tools.evaluate import bundles
from draftwood.tools.evaluate.peers import Generate, open_peer
from draftwood.tools.evaluate.prefilled import Prefilled
from draftwood.tools.evaluate.suite import Suite
from draftwood.tools.measure.tune import tune
from draftwood.tools.prompts import Prompt, read_families

TUNE_SECONDS = 4.0
STRIDE = 7
# Behind so many tokens the tree that promises most is chosen.
TYPICAL = 200


@dataclass(frozen=True)
class Opened:
    """An engine on one bundle, with the step times that were measured on this machine."""

    engine: CpuEngine
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
        return Policies(bundle, "fixed", self.tree if name == "tree" else name)

    @cached_property
    def tree(self) -> str:
        """The gear of the fixed tree that promises most tokens a second, by counted paths and measured times."""
        bundle, paths = self.engine.bundle, counted(self.drafter, sampled=False).rank_paths()
        gears = Policies(bundle, "adaptive", times=self.times).gears
        slots = min(gear.slots for gear in bundle.manifest.gears)

        def worth(name: str) -> float:
            tree = bundle.trees[bundle.gear(name).tree][0]
            return paths.expected_accept_length(tree) / gears.times.us(gears.number[name], TYPICAL)

        # Counted paths say nothing of a budget tree.
        fixed = (gear for gear in bundle.manifest.gears if gear.draft and gear.tree in bundle.trees)
        return max((gear.name for gear in fixed if gear.slots == slots), key=worth)


class Lab:
    """The bench of one process. ``work`` keeps widened models and bundles from run to run."""

    def __init__(self, suite: Suite, work: Path, threads: int | None = None) -> None:
        self.suite, self.work, self.threads = suite, work, threads
        work.mkdir(parents=True, exist_ok=True)
        share_threads(threads)
        # What the last section warmed up; another section's work goes through the processor's caches.
        self.warmed: tuple[object, ...] = ()
        self._open: dict[tuple[object, ...], Opened] = {}
        self._prefilled: tuple[tuple[object, ...], Prefilled] | None = None
        self._peers: dict[tuple[str, str], Generate | str] = {}

    @cached_property
    def prompts(self) -> list[Prompt]:
        """The suite's prompts."""
        return read_families(self.suite.prompts)

    def conversations(self, limit: int | None) -> list[list[Prompt]]:
        """Prompts by conversation; ``limit`` of them, of every source alike."""
        return conversations(self.prompts, limit)

    def planned(self, size: str, drafter: str) -> Opened:
        """The pair with planned trees, tuned on this machine; one bundle for all sections of the suite."""

        def bundle() -> Bundle:
            return Bundle.open(bundles.planned_bundle(size, drafter, self._reach, self.work, self.say))

        return self._opened(("planned", size, drafter), bundle, tuned=True)

    @property
    def _reach(self) -> int:
        """Tokens of the longest text that any section asks for."""
        return max(max(ask.lengths, default=0) + ask.max_new_tokens for ask in self.suite.sections.values())

    def trees(self, size: str, drafter: str, trees: bundles.Trees, reach: int = 0) -> Opened:
        """The pair with ``trees``, not tuned; those of a drafter that ranks levels need no build of their own."""

        def bundle() -> Bundle:
            found = Bundle.open(bundles.tree_bundle(size, drafter, reach, trees, self.work, self.say))
            return found if demo.follows_nodes(drafter) else bundles.with_trees(found, trees)

        return self._opened(("trees", size, drafter, bundles.kv_lengths(reach), trees), bundle, tuned=False)

    def on(self, opened: Opened, engine: str) -> Engine:
        """The bundle on another engine, opened once; the CPU's is there already."""
        if engine == "cpu":
            return opened.engine
        if engine not in opened.others:
            opened.others[engine] = open_engine(opened.engine.bundle, engine, self.threads)
        return opened.others[engine]

    def windowed(self, size: str, drafter: str, window: int, reach: int) -> Opened:
        """The pair whose drafter sees ``window`` tokens; 0 for all."""

        def bundle() -> Bundle:
            return Bundle.open(bundles.windowed_bundle(size, drafter, reach, window, self.work, self.say))

        return self._opened(("window", size, drafter, window), bundle, tuned=False)

    def bitwise(self, size: str, drafter: str, bitwise: bool) -> Opened:
        """The pair that has both of the CPU's steps, on the engine that has bits in mind or on the ordinary one."""

        def bundle() -> Bundle:
            return Bundle.open(bundles.bitwise_bundle(size, drafter, self.work, self.say))

        return self._opened(("bitwise", size, drafter, bitwise), bundle, False, BitwiseEngine if bitwise else CpuEngine)

    def precise(self, size: str, drafter: str, precision: str) -> Opened:
        """The pair with a teacher in fp32 or in w8a8; the former is `bitwise`'s, decoded ordinarily."""

        def bundle() -> Bundle:
            return Bundle.open(bundles.quantised_bundle(size, drafter, self.work, self.say))

        if precision == "fp32":
            return self.bitwise(size, drafter, False)
        return self._opened((precision, size, drafter), bundle, tuned=False)

    def lowered(self, size: str, drafter: str) -> Bundle:
        """The pair's graphs for an NPU."""
        return Bundle.open(bundles.lowered_bundle(size, drafter, self.work, self.say))

    def text(self, engine: CpuEngine, length: int, number: int) -> tuple[str, list[int]]:
        """The ``number``-th text of a length, from 0; RequestError where the prompts do not make so many."""
        found = next(islice(texts(engine, self.prompts, length), number, None), None)
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
            teacher, _ = models(size, self.work, demo.DRAFTERS[0])
            threads = self.threads or len(os.sched_getaffinity(0))
            self._peers[size, name] = open_peer(name, teacher, self.work, threads)
        return self._peers[size, name]

    def say(self, what: str) -> None:
        """Tells the user what is done now, where it is no measurement."""
        print(what, file=sys.stderr, flush=True)

    def _opened(
        self, key: tuple[object, ...], make: Callable[[], Bundle], tuned: bool, kind: type[CpuEngine] = CpuEngine
    ) -> Opened:
        if key not in self._open:
            # One size at a time, or the memory of a large one would be held beside the next.
            self._open = {held: one for held, one in self._open.items() if held[1] == key[1]}
            bundle = make()
            engine = kind(bundle)
            times = self._times(engine) if tuned else ()
            self._open[key] = Opened(engine, str(key[2]), bundle_digest(bundle), times)
        return self._open[key]

    def _times(self, engine: CpuEngine) -> tuple[StepTime, ...]:
        """Kept in the user's cache: all tasks of a run, and of one that goes on, choose by one table."""
        threads = self.threads or len(os.sched_getaffinity(0))
        kept = tuned_times(engine.bundle, "cpu", threads)
        if not kept:
            self.say(f"timing the gears of {engine.bundle.folder.name}")
            kept = tuple(tune(engine, TUNE_SECONDS))
            keep_times(engine.bundle, "cpu", threads, kept)
        return kept


def conversations(prompts: list[Prompt], limit: int | None) -> list[list[Prompt]]:
    """Prompts by conversation; with a limit they are taken from the sources in turn, evenly over each."""
    whole: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        whole.setdefault(prompt.conversation, []).append(prompt)
    if limit is None or limit >= len(whole):
        return list(whole.values())
    sources: dict[str, list[list[Prompt]]] = {}
    for turns in whole.values():
        sources.setdefault(turns[0].source, []).append(turns)
    share, more = divmod(limit, len(sources))
    found = []
    for number, own in enumerate(sources.values()):
        count = min(share + (number < more), len(own))
        found += [own[at * len(own) // count] for at in range(count)]
    return found


def texts(engine: CpuEngine, prompts: list[Prompt], length: int) -> Iterator[tuple[str, list[int]]]:
    """Names and ids of prompts of about ``length`` tokens: documents before a question, both of the prompts.

    Every seventh prompt comes first, so that few texts are of many kinds.
    """
    tokenizer = engine.bundle.tokenizer
    assert tokenizer is not None, "the demo teacher has a tokenizer"
    for at in (at for first in range(STRIDE) for at in range(first, len(prompts), STRIDE)):
        if found := behind_documents(prompts, at, length, tokenizer):
            yield found.id, tokenizer.chat([{"role": "user", "content": found.text}])
