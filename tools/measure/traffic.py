"""Rank paths from a bundle's own decoding: what production traffic, too, can log.

A step's context is where the decoding really stood, and its path is what the teacher took through the tree that was
drafted: nodes that the bundle's tree does not have were never proposed and are not counted, so let the bundle decode
with a wide tree. Re-planning from such counts can make the tree smaller and better shaped; to make it larger, count
the teacher's text with ``--model``.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence

from draftwood.runtime.bundle import Bundle
from draftwood.runtime.decoding import Decoding, Options, Result
from draftwood.runtime.engines import StagedEngine
from draftwood.runtime.policy import policy_for
from draftwood.runtime.trace import Trace
from draftwood.tools.measure.bench import turn_prompts
from draftwood.tools.prompts import Prompt
from draftwood.trees.calibration import Calibration


def widest_gear(bundle: Bundle) -> str:
    """The gear of the most rows, at the least KV length that has it."""
    rows = {tree.name: tree.rows for tree in bundle.manifest.trees}
    return max(bundle.manifest.gears, key=lambda gear: (rows[gear.tree], -gear.slots)).name


def count_traffic(
    engine: StagedEngine, prompts: list[Prompt], options: Options, calibration: Calibration
) -> Iterator[tuple[Prompt, Result]]:
    """Answers every turn with the bundle's largest tree and adds its steps to ``calibration``.

    A turn that is counted already is answered again, for later turns build on it, but not counted twice.
    """
    answers: dict[str, Sequence[int]] = {}
    policy = policy_for(engine.bundle, widest_gear(engine.bundle))
    for prompt, ids in turn_prompts(engine, prompts, answers):
        trace = Trace()
        result = Decoding(engine, ids, options, policy, trace).run()
        answers[prompt.conversation] = result.token_ids
        name = _name(engine.bundle, prompt, options)
        if name not in calibration.sources:
            drafted = [event for event in trace.events if event.kind == "verify"]
            for event in drafted:
                calibration.add(
                    event.path,
                    group=prompt.conversation,
                    context=event.position + 1,
                    confidence=event.confidence,
                    task=prompt.source,
                    sampled=not options.sampling.greedy,
                )
            calibration.sources[name] = 1
        yield prompt, result


def _name(bundle: Bundle, prompt: Prompt, options: Options) -> str:
    """Stands for all that decides a turn's steps."""
    drafter = bundle.manifest.drafter.digest if bundle.manifest.drafter else ""
    trees = [
        (tree.name, bundle.manifest.files[tree.file].sha256 if tree.file else None) for tree in bundle.manifest.trees
    ]
    content = f"{bundle.manifest.teacher.digest} {drafter} {trees} {options} {prompt}"
    return f"traffic-{zlib.crc32(content.encode()):08x}"
