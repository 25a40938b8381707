"""Rank paths from a bundle's own decoding: what production traffic, too, can log.

A step's context is where the decoding really stood, and its path is what the teacher took through the tree that was
drafted: nodes that the bundle's tree does not have were never proposed and are not counted, so let the bundle decode
with a wide tree. Re-planning from such counts can make the tree smaller and better shaped; to make it larger, count
the teacher's text with ``--model``.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from draftwood.manifest import Gear
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.cache import Cache
from draftwood.runtime.decode import Decoding, Options, Result
from draftwood.runtime.drafting import Draft
from draftwood.runtime.engine import Engine, StepResult
from draftwood.runtime.policy import policy_for
from draftwood.runtime.trace import Trace
from draftwood.tools.commands.bench import turn_prompts
from draftwood.tools.prompts import Prompt
from draftwood.trees import TreeBuffers
from draftwood.trees.calibration import Calibration


class Observed:
    """An engine that remembers the root's confidence of every draft: the probability of its best first candidate."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.bundle = engine, engine.bundle
        self.confidence: list[float] = []

    def new_cache(self, slots: int) -> Cache:
        return self.engine.new_cache(slots)

    def prefill(self, cache: Cache, tokens: NDArray[np.int64]) -> StepResult:
        return self.engine.prefill(cache, tokens)

    def verify(self, cache: Cache, tokens_T: NDArray[np.int64], tree: TreeBuffers) -> StepResult:
        return self.engine.verify(cache, tokens_T, tree)

    def draft(self, cache: Cache, gear: Gear, root: int) -> Draft:
        drafted = self.engine.draft(cache, gear, root)
        self.confidence.append(drafted.confidence)
        return drafted


def widest_gear(bundle: Bundle) -> str:
    """The gear of the most rows, at the least KV length that has it."""
    rows = {tree.name: tree.rows for tree in bundle.manifest.trees}
    return max(bundle.manifest.gears, key=lambda gear: (rows[gear.tree], -gear.slots)).name


def count_traffic(
    engine: Engine, prompts: list[Prompt], options: Options, calibration: Calibration
) -> Iterator[tuple[Prompt, Result]]:
    """Answers every turn with the bundle's largest tree and adds its steps to ``calibration``.

    A turn that is counted already is answered again, for later turns build on it, but not counted twice.
    """
    observed, done = Observed(engine), {}
    policy = policy_for(engine.bundle, widest_gear(engine.bundle))
    for prompt, ids in turn_prompts(engine, prompts, done):
        observed.confidence.clear()
        trace = Trace()
        result = Decoding(observed, ids, options, policy, trace).run()
        done[prompt.conversation] = result
        name = _name(engine.bundle, prompt, options)
        if name not in calibration.sources:
            drafted = [event for event in trace.events if event.kind == "verify"]
            for event, confidence in zip(drafted, observed.confidence, strict=True):
                calibration.add(
                    event.path,
                    group=prompt.conversation,
                    context=event.position + 1,
                    confidence=confidence,
                    task=prompt.source,
                )
            calibration.sources[name] = 1
        yield prompt, result


def _name(bundle: Bundle, prompt: Prompt, options: Options) -> str:
    """Stands for all that decides a turn's steps."""
    drafter = bundle.manifest.drafter.digest if bundle.manifest.drafter else ""
    trees = [(tree.name, bundle.manifest.files.get(tree.file or "")) for tree in bundle.manifest.trees]
    content = f"{bundle.manifest.teacher.digest} {drafter} {trees} {options} {prompt}"
    return f"traffic-{zlib.crc32(content.encode()):08x}"
