"""A drafter's tree and looked-up tokens, as one: by hand, and as drafts that change no token."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

import draftwood
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.decoding import Decoding
from draftwood.runtime.engines.choice import open_engine
from draftwood.runtime.engines.opening import Opening
from draftwood.runtime.options import Options
from draftwood.runtime.policy import FixedTree
from draftwood.runtime.rounding import HALF_TOLERANCE
from draftwood.runtime.speculation.drafting import Drafting
from draftwood.runtime.speculation.lookup import GOES_ON, HOPE, LOOKED_UP, TextIndex
from draftwood.runtime.speculation.merging import merged
from draftwood.runtime.speculation.sampling import Sampling
from draftwood.runtime.speculation.step import Draft
from draftwood.runtime.trace import Trace
from draftwood.tools.comparison.check import check, sample_prompts
from draftwood.tools.comparison.compare import Pair
from draftwood.tools.comparison.device_steps import compare_whole
from draftwood.trees import Topology, tensorize, violations
from draftwood.trees.spec import Budget, read_specs

TREE = Topology.from_paths([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0)])
PATHS = np.log(np.array([0.5, 0.3, 0.1, 0.3, 0.1, 0.2], np.float32))
DRAFT = Draft(np.array([7, 1, 2, 3, 4, 5, 6]), PATHS, tensorize(TREE))
CIRCLE = [7, 8, 9, 10, 11, 7, 8, 9, 10, 11, 7, 8]


def told(draft: Draft) -> set[tuple[int, ...]]:
    """The texts that a tree proposes after its root, whatever its rows and ranks are."""
    tokens, paths = draft.tokens_T.tolist(), draft.tree.paths.tolist()
    return {tuple(tokens[row] for row in dict.fromkeys(path)) for path in paths}


def test_the_least_likely_make_room() -> None:
    found = merged(DRAFT, [(2, 0.6), (9, 0.5), (8, 0.4)])
    assert not violations(found.tree) and found.tree.rows == DRAFT.tree.rows
    # 0.5 and 0.3 below it, 0.6 for the token of both, 0.5 and 0.4 below that, then 0.2.
    assert told(found) == {(7,), (7, 1), (7, 2), (7, 1, 4), (7, 2, 6), (7, 2, 9), (7, 2, 9, 8)}
    assert found.confidence == DRAFT.confidence


def test_what_is_less_likely_changes_nothing() -> None:
    assert merged(DRAFT, [(9, 0.05)]) is DRAFT and merged(DRAFT, []) is DRAFT
    assert merged(DRAFT, [(1, 0.9), (4, 0.8)]) is DRAFT  # it is there


def test_scores_of_ranked_levels_are_multiplied() -> None:
    # 0.3, 0.075 and 0.18 of whole paths: the second is the least of all, though not by its own score.
    own = np.log(np.array([0.5, 0.3, 0.1, 0.6, 0.15, 0.6], np.float32))
    ranked = DRAFT._replace(scores_M=own, candidates_IK=np.array([[1, 2, 3], [4, 5, 6]]))
    (lost,) = told(DRAFT) - told(merged(ranked, [(9, 0.15)]))
    assert lost == (7, 1, 5)


def test_a_text_says_how_often_it_goes_on_as_before() -> None:
    index = TextIndex()
    index.extend([1, 2, 3] * 3 + [1, 2])
    # The match has eight tokens, and no token came after one of eight so far.
    assert index.match == 8 and index.ahead(1, Sampling(), 10) == [(3, pytest.approx(GOES_ON[4]))]
    tokens, falling = zip(*index.ahead(4, Sampling(), 10), strict=True)
    assert tokens == (3, 1, 2, 3) and list(falling) == sorted(falling, reverse=True)
    other = TextIndex()
    other.extend([5, 1, 5, 2, 5, 3, 5])
    ((_, chance),) = other.ahead(1, Sampling(), 6)[:1]
    assert chance == pytest.approx(HOPE * GOES_ON[1] / (HOPE + 2))  # twice something else came behind "5"


@pytest.fixture(scope="module")
def both(
    tiny_teacher: Path, tiny_drafters: dict[str, Path], whole_bundle: Path, kept: Callable[..., Path]
) -> dict[str, Path]:
    """Bundles with a drafter's trees and one that is looked up, for a CPU; that of Medusa's heads for an NPU."""
    trees = (
        ("plain", Topology.plain()),
        ("fixed", TREE),
        ("budget", Budget(6, 3, 3)),
        read_specs("lookup:chain:6").trees[-1],  # seven rows, as the others
    )
    request = draftwood.BuildRequest(
        model=tiny_teacher, drafter=tiny_drafters["eagle3"], trees=trees, slots=(128,), prefill_rows=(16,)
    )
    return {"eagle3": kept("both-eagle3", partial(draftwood.build, request)), "medusa": whole_bundle}


def test_a_chain_whose_rows_are_rounded_stays_a_chain(both: dict[str, Path]) -> None:
    """The engine for texts of its bundle is not the one that a tree of several paths needs."""
    bundle = Bundle.open(both["eagle3"])
    (onnx,) = bundle.manifest.graph_sets
    chains = tuple(tree for tree in bundle.manifest.trees if tree.name in ("plain", "lookup-chain-6"))
    rounded = (replace(onnx, precision=replace(onnx.precision, weights="int8")),)

    def ahead(**changed: object) -> int:
        manifest = replace(bundle.manifest, **changed)
        own = Bundle(bundle.folder, manifest, bundle.trees, bundle.files, bundle.verified)
        return Drafting(own, [], lambda *_: {}, np.zeros)._ahead

    assert ahead() == ahead(trees=chains) == ahead(graph_sets=rounded) == 6
    assert ahead(graph_sets=rounded, trees=chains) == 0


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(("kind", "engine"), [("eagle3", "cpu"), ("eagle3", "static"), ("medusa", "eager")])
def test_texts_are_those_of_plain_decoding(both: dict[str, Path], kind: str, engine: str, temperature: float) -> None:
    looked_up = 0
    with draftwood.open(both[kind], engine=engine) as model:
        names = [gear.name for gear in model.manifest.gears if gear.neural]
        for seed in range(2 if temperature else 1):
            asked = {"temperature": temperature, "seed": seed, "max_new_tokens": 40, "ignore_eos": True}
            plain = model.generate(CIRCLE, policy="plain", **asked)
            for policy in (*names, "adaptive"):
                trace = Trace()
                assert model.generate(CIRCLE, policy=policy, trace=trace, **asked).token_ids == plain.token_ids
                looked_up += sum(LOOKED_UP in event.path for event in trace.events)
    assert looked_up or temperature


def test_a_tree_of_both_is_accepted_on_a_device(both: dict[str, Path]) -> None:
    """By the NPU's graphs, which take the tree as an input."""
    bundle = Bundle.open(both["medusa"])
    engine, gear = open_engine(bundle, Opening(engine="ge")), next(one for one in bundle.manifest.gears if one.neural)
    engine.on_device.apart, texts = True, []  # one launch drafts for itself
    for policy in (FixedTree(bundle), FixedTree(bundle, gear.name)):
        trace = Trace()
        options = Options(max_new_tokens=16, ignore_eos=True)
        texts.append(Decoding(engine, CIRCLE, options, policy, trace).run().token_ids)
    assert texts[0] == texts[1] and any(LOOKED_UP in event.path for event in trace.events)


def test_one_launch_is_held_to_parts_that_look_nothing_up(both: dict[str, Path]) -> None:
    bundle = Bundle.open(both["medusa"])
    engine, gear = open_engine(bundle, Opening(engine="ge")), next(one for one in bundle.manifest.gears if one.neural)
    pair = Pair("ge", engine, engine, HALF_TOLERANCE)
    found = list(compare_whole(pair, gear, np.array(CIRCLE)))
    assert all(one.ok for one in found) and {one.where for one in found} >= {"step 0", "step 3"}


def test_check_holds_for_both(both: dict[str, Path]) -> None:
    bundle = Bundle.open(both["eagle3"])
    report = check(bundle, list(sample_prompts(bundle, None, 1)))
    assert report["ok"] and report["mutations_caught"] == report["mutations"] > 0
