"""No choice changes a token: whatever gear runs at whatever step, the text is plain decoding's."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from draftwood.manifest import Gear
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.decoding import Decoding, Result
from draftwood.runtime.engines.cpu import CpuEngine
from draftwood.runtime.engines.engine import Engine
from draftwood.runtime.engines.static import OnnxStaticEngine
from draftwood.runtime.options import Options
from draftwood.runtime.policy import Expected, FixedTree, Gears, Policies, Policy
from draftwood.runtime.speculation.sampling import Sampling
from draftwood.runtime.speculation.step import Outcome
from draftwood.runtime.trace import Trace

SAMPLINGS = {"greedy": Sampling(), "sampled": Sampling(temperature=0.8, seed=11)}


class Fuzzed:
    """At every step any gear that fits, another than at the step before where there is one."""

    def __init__(self, bundle: Bundle, seed: int) -> None:
        self._gears, self._random = Gears.of(bundle), np.random.default_rng(seed)
        self._slots, self._last, self._next = 0, "", self._random.random()

    def choose(self, length: int, late: int = 0, match: int = 0) -> Gear | None:
        fit = self._gears.fitting(length, self._slots)
        gears = list(fit.values())
        others = [gear for gear in gears if gear.name != self._last] or gears
        return others[int(self._next * len(others))] if others else None

    def observe(self, outcome: Outcome) -> None:
        self._slots, self._last = max(self._slots, outcome.gear.slots), outcome.gear.name
        self._next = self._random.random()

    def expected(self) -> Expected | None:
        return None


@pytest.fixture(scope="module", params=["medusa", "eagle3", "fasteagle"])
def folder(request: pytest.FixtureRequest, tiny_bundles: dict[str, Path]) -> Path:
    return tiny_bundles[request.param]


@pytest.fixture(scope="module", params=[CpuEngine, OnnxStaticEngine], ids=["cpu", "static"])
def engine(request: pytest.FixtureRequest, folder: Path) -> Engine:
    return request.param(Bundle.open(folder))


def decoded(
    engine: Engine, prompt: list[int], policy: Policy, sampling: Sampling, trace: Trace | None = None, tokens: int = 60
) -> Result:
    options = Options(max_new_tokens=tokens, sampling=sampling, ignore_eos=True)
    return Decoding(engine, prompt, options, policy, trace).run()


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_switching_gears_at_every_step_changes_no_token(engine: Engine, prompt: list[int], sampling: Sampling) -> None:
    every, trace = {"sampling": sampling, "tokens": 1000}, Trace()  # to the end of the context
    plain = decoded(engine, prompt, FixedTree(engine.bundle), **every)
    fuzzed = decoded(engine, prompt, Fuzzed(engine.bundle, 0), **every, trace=trace)
    assert fuzzed.token_ids == plain.token_ids
    ran = {event.gear for event in trace.events}
    assert ran >= {gear.name for gear in engine.bundle.manifest.gears}
    names = [event.gear for event in trace.events[1:30]]
    assert all(one != other for one, other in pairwise(names))


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_the_adaptive_policy_changes_no_token(engine: Engine, prompt: list[int], sampling: Sampling) -> None:
    plain, trace = decoded(engine, prompt, FixedTree(engine.bundle), sampling), Trace()
    policy = Policies(engine.bundle).new(sampling.greedy, 128)
    adaptive = decoded(engine, prompt, policy, sampling, trace)
    assert adaptive.token_ids == plain.token_ids
    assert any(event.kind == "verify" for event in trace.events)
    assert all(event.expected_us and event.expected_tokens for event in trace.events if event.kind != "prefill")


def test_a_ranked_drafter_tells_the_rank_of_every_bonus(tiny_bundle: Path, prompt: list[int]) -> None:
    """After a path shorter than the levels there are; the path and the rank name the same token."""
    engine, trace = CpuEngine(Bundle.open(tiny_bundle)), Trace()
    decoded(engine, prompt, FixedTree(engine.bundle, "chain-2-kv256"), SAMPLINGS["sampled"], trace)
    steps = [event for event in trace.events if event.kind == "verify"]
    assert all((event.rank is None) == (len(event.path) == 2) for event in steps)
    assert any(event.rank not in (None, 0) for event in steps)
    assert all(event.rank != 0 for event in steps)  # the chain has rank 0 everywhere
