"""Five to eight texts in a launch, whatever drafts for them: tokens, acceptance by depth, and kept prefixes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from draftwood.planned import named_gears
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.decoding import Decoding
from draftwood.runtime.engines.cpu import CpuEngine
from draftwood.runtime.engines.opening import Opening
from draftwood.runtime.opened import OpenedBundle
from draftwood.runtime.options import Options
from draftwood.runtime.policy import FixedTree, Policies
from draftwood.runtime.sharing import advance
from draftwood.runtime.speculation.sampling import Sampling
from draftwood.runtime.speculation.step import Outcome
from draftwood.tests.decoded import ended
from draftwood.trees import Topology
from draftwood.trees.spec import read_specs

MOST = 8
TREES = (("plain", Topology.plain()), ("backbone", Topology.backbone(3, 2)))
# What they share with EAGLE-3 is tested with it; a bundle of theirs takes a while to build.
SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("dflash", "peagle", "dspark")]
KINDS = ["eagle3", "lookup", *SLOW]


@pytest.fixture(scope="session")
def crowded(
    tiny_teacher: Path,
    tiny_eagle3: Path,
    save_one_pass: dict[str, Callable[[Path], None]],
    kept: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], CpuEngine]:
    """An engine by the kind of drafter, with graphs of one, four and eight texts. Nothing is changed in it."""
    from draftwood.compiler.bundle.build import build
    from draftwood.compiler.bundle.request import BuildRequest

    opened: dict[str, CpuEngine] = {}

    def of(kind: str) -> CpuEngine:
        if kind not in opened:
            drafter = {"eagle3": tiny_eagle3, "lookup": None}.get(kind, tmp_path_factory.mktemp(kind) / "drafter")
            if drafter is not None and kind in save_one_pass:
                save_one_pass[kind](drafter)
            trees = read_specs("lookup:chain:3").trees if kind == "lookup" else TREES
            gears = tuple(replace(gear, texts=(1, 4, 8)) for gear in named_gears((name, 128) for name, _ in trees))
            request = BuildRequest(
                model=tiny_teacher, drafter=drafter, trees=trees, slots=(128,), prefill_rows=(), gears=gears
            )
            opened[kind] = CpuEngine(Bundle.open(kept(f"crowded-{kind}", partial(build, request))), Opening(threads=1))
        return opened[kind]

    return of


def prompt(seed: int, count: int) -> list[int]:
    """Tokens that come back now and then, so that something is looked up."""
    own = np.random.default_rng(seed).integers(3, 200, 7).tolist()
    return (own * (count // 7 + 1))[:count]


def decodings(engine: CpuEngine, count: int, names: Sequence[str]) -> list[Decoding]:
    """Texts of all lengths, a third of them greedy, each with another policy."""
    policies, found = [Policies(engine.bundle, name) for name in names], []
    for text in range(count):
        sampling = Sampling(temperature=0.4 * (text % 3), top_p=0.9 if text % 2 else 1.0, seed=text)
        options = Options(max_new_tokens=12 + text, sampling=sampling, ignore_eos=True)
        policy = policies[text % len(policies)].new(sampling.greedy, options.max_new_tokens)
        found.append(Decoding(engine, prompt(text, 3 + 4 * text), options, policy))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_five_to_eight_texts_that_come_and_go_are_plain_texts(crowded: Callable[[str], CpuEngine], kind: str) -> None:
    """Greedy and sampled, plain and drafted in one launch; at nearly every step one joins or leaves. Three in a graph
    of four, and five to seven in one of eight, have places next to them that nobody has."""
    engine = crowded(kind)
    gears = [gear.name for gear in engine.bundle.manifest.gears]
    alone = [text.run().token_ids for text in decodings(engine, 14, ["plain"])]
    texts = decodings(engine, 14, ["adaptive", *gears])
    waiting, rng, going, counts = list(texts), random.Random(7), list[Decoding](), cycle([8, 7, 6, 5, 3])
    sizes: set[int] = set()
    while waiting or going:
        while waiting and len(going) < MOST and (not sizes or len(going) < 5 or rng.random() < 0.5):
            going.append(waiting.pop(rng.randrange(len(waiting))))
            going[-1].start()
        outcomes = advance(engine, rng.sample(going, min(next(counts), len(going))))
        sizes |= {one.texts for one in outcomes}
        for text in going:
            text.state.check()
        going = [text for text in going if not text.finished]
    for text, plain in zip(texts, alone, strict=True):
        assert ended(text).token_ids == plain
    assert {3, 5, 6, 7, 8} <= sizes


def accepted(engine: CpuEngine, texts: int, seeds: range) -> list[Outcome]:
    """The steps of sampled texts with a tree of fixed shape, so many of them in a launch."""
    gear, found = FixedTree(engine.bundle, "backbone-kv128"), list[Outcome]()
    for first in range(0, len(seeds), texts):
        going = []
        for seed in seeds[first : first + texts]:
            options = Options(max_new_tokens=40, sampling=Sampling(temperature=0.3, seed=seed), ignore_eos=True)
            going.append(Decoding(engine, prompt(seed % 5, 20), options, gear))
            going[-1].start()
        while going := [text for text in going if not text.finished]:
            found += advance(engine, going)
    return found


def by_depth(outcomes: Sequence[Outcome]) -> Iterator[tuple[int, int]]:
    """Steps that came to a depth, and those of them that went on."""
    for depth in range(3):
        came = [one for one in outcomes if len(one.path) >= depth]
        yield len(came), sum(len(one.path) > depth for one in came)


def apart(one: Sequence[Outcome], other: Sequence[Outcome]) -> float:
    """By how many standard deviations two shares differ, at the depth where they do most."""
    found = []
    for (n, hits), (m, others) in zip(by_depth(one), by_depth(other), strict=True):
        share = (hits + others) / (n + m)
        found.append(abs(hits / n - others / m) / np.sqrt(max(share * (1 - share), 1e-9) * (1 / n + 1 / m)))
    return float(max(found))


def test_acceptance_at_every_depth_is_that_of_texts_alone(
    crowded: Callable[[str], CpuEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of other seeds. It would not be, were one text given the features of another: no token would tell."""
    engine = crowded("eagle3")
    alone, shared = accepted(engine, 1, range(32)), accepted(engine, MOST, range(100, 132))
    assert min(n for n, _ in by_depth(alone)) > 50 and apart(alone, shared) < 4  # one of 5000 honest runs is beyond
    honest = engine.verify

    def mixed_up(states: Any, drafts: Any) -> Any:
        outputs = honest(states, drafts)
        features = [one.features_RF.copy() for one in outputs]
        return [one._replace(features_RF=of) for one, of in zip(outputs, features[1:] + features[:1], strict=True)]

    monkeypatch.setattr(engine, "verify", mixed_up)
    assert apart(alone, accepted(engine, MOST, range(100, 132))) > 8


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 0.8])
@pytest.mark.parametrize("kind", KINDS)
def test_kept_prefixes_change_no_text(crowded: Callable[[str], CpuEngine], kind: str, temperature: float) -> None:
    """Turns of a chat, and another chat after the same beginning, which copies it; drafted from the first step on."""
    engine = crowded(kind)
    model, fresh = OpenedBundle(engine.bundle, engine), OpenedBundle(engine.bundle, engine, Opening(prefixes=False))
    gear = engine.bundle.manifest.gears[-1].name
    asked: dict[str, Any] = {"temperature": temperature, "seed": 5, "max_new_tokens": 14, "ignore_eos": True}
    beginning = prompt(1, 30)
    chats = [[*beginning, *prompt(2, 20)], [*beginning, *prompt(3, 9)]]
    for turn in range(2):
        for number, chat in enumerate(chats):
            for policy in (gear, "adaptive"):
                want, got = (one.generate(chat, policy=policy, **asked) for one in (fresh, model))
                assert got.token_ids == want.token_ids == fresh.generate(chat, policy="plain", **asked).token_ids
                assert want.prefix_tokens == 0
                assert got.prefix_tokens >= 29 or (turn, number, policy) == (0, 0, gear)
            chats[number] = [*chat, *got.token_ids, 7, 8]
    assert model.figures().prefix_hits == 7
