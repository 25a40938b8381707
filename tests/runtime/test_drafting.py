"""Drafters with caches of their own: any tree and engine gives the text of plain decoding, and the caches are right."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftwood.errors import InvariantError
from draftwood.manifest import Drafter
from draftwood.runtime import drafting
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.decode import Decoding, Options, Result, walk
from draftwood.runtime.draft_cache import DraftCache
from draftwood.runtime.engine import Engine
from draftwood.runtime.engines.cpu import CpuEngine
from draftwood.runtime.engines.static import OnnxEngine
from draftwood.runtime.policy import policy_for
from draftwood.runtime.sampling import Sampling
from draftwood.runtime.trace import Trace
from draftwood.trees import Topology, tensorize, violations
from draftwood.trees import walk as walk_topology

TREES = ["backbone", "planned"]
CASES = [("fasteagle", tree) for tree in TREES] + [("eagle3", tree) for tree in [*TREES, "budget"]]
SAMPLINGS = {"greedy": Sampling(), "sampled": Sampling(temperature=0.8, top_k=3, seed=11)}
# fp32 through one to three blocks, in another split of the same rows.
CLOSE = 1e-5


@pytest.fixture(scope="module", params=[CpuEngine, OnnxEngine], ids=["cpu", "static"])
def engines(request: pytest.FixtureRequest, tiny_draft_bundles: dict[str, Path]) -> dict[str, Engine]:
    return {kind: request.param(Bundle.open(folder)) for kind, folder in tiny_draft_bundles.items()}


def decoded(engine: Engine, prompt: list[int], gear: str, trace: Trace | None = None, **options: object) -> Result:
    settings = Options(**{"max_new_tokens": 60, "ignore_eos": True, **options})
    return Decoding(engine, prompt, settings, policy_for(engine.bundle, gear), trace).run()


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize(("kind", "tree"), CASES)
def test_the_text_is_that_of_plain_decoding(
    engines: dict[str, Engine], prompt: list[int], kind: str, tree: str, sampling: Sampling
) -> None:
    trace = Trace()
    plain = decoded(engines[kind], prompt, "plain-kv128", sampling=sampling)
    speculative = decoded(engines[kind], prompt, f"{tree}-kv128", trace, sampling=sampling)
    assert speculative.token_ids == plain.token_ids
    accepted = [event.path for event in trace.events if event.path]
    assert speculative.steps < plain.steps and accepted  # drafts hit, else the equality shows little
    if sampling.greedy:
        assert speculative.steps < 55


@pytest.mark.parametrize(("kind", "tree"), [("fasteagle", "planned"), ("eagle3", "planned"), ("eagle3", "budget")])
def test_growing_and_the_context_limit(engines: dict[str, Engine], prompt: list[int], kind: str, tree: str) -> None:
    """From one KV length to the next, then plainly where the tree no longer fits, to the very end."""
    trace = Trace()
    result = decoded(engines[kind], prompt, f"{tree}-kv128", trace, max_new_tokens=1000)
    assert result.token_ids == decoded(engines[kind], prompt, "plain-kv128", max_new_tokens=1000).token_ids
    gears = list(dict.fromkeys(event.gear for event in trace.events if event.kind != "prefill"))
    grown = [f"{tree}-kv256", "plain-kv256"] if kind == "fasteagle" else ["plain-kv128"]
    assert gears == [f"{tree}-kv128", *grown]


def committed(engine: Engine, gear: str, prompt: list[int], steps: int) -> tuple[Any, list[int]]:
    """A text after some tree steps whose commits take every kind of path; its last token is the root."""
    chosen = engine.bundle.gear(gear)
    cache = engine.new_cache(chosen.slots)
    text = [*prompt, int(engine.prefill(cache, np.array(prompt)).choice_R[0])]
    for step in range(steps):
        tokens_T, _, tree, _ = engine.draft(cache, chosen, text[-1])
        result = engine.verify(cache, tokens_T, tree)
        row = (5 * step + tree.rows - 1) % tree.rows
        rows = tree.paths[row, : tree.depths[row] + 1].tolist()
        cache.commit(rows)
        cache.check()
        text += [*tokens_T[rows[1:]].tolist(), int(result.choice_R[row])]
    return cache, text


@pytest.mark.parametrize(("kind", "tree"), [("fasteagle", "planned"), ("eagle3", "planned"), ("eagle3", "budget")])
def test_the_cache_is_that_of_the_accepted_text(
    engines: dict[str, Engine], prompt: list[int], kind: str, tree: str
) -> None:
    engine, gear = engines[kind], f"{tree}-kv128"
    cache, text = committed(engine, gear, prompt, 8)
    fresh = engine.new_cache(128)
    engine.prefill(fresh, np.array(text[:-1]))
    drafts = [engine.draft(one, engine.bundle.gear(gear), text[-1]) for one in (cache, fresh)]
    assert np.array_equal(drafts[0].tokens_T, drafts[1].tokens_T)
    length = len(text) - 1
    assert len(cache.draft.sides) == {"fasteagle": 6, "eagle3": 2}[kind]
    for ours, theirs in zip(cache.draft.sides, fresh.draft.sides, strict=True):
        np.testing.assert_allclose(ours[:, :length], theirs[:, :length], rtol=0, atol=CLOSE)
        assert not ours[:, length:-1].any()  # nothing of a draft tree was ever kept


@pytest.mark.parametrize("kind", ["fasteagle", "eagle3"])
def test_a_slot_holds_the_next_token_beside_the_features_of_its_own(
    engines: dict[str, Engine], prompt: list[int], kind: str
) -> None:
    """The networks themselves, over the whole text at once: none of the runtime's bookkeeping is shared."""
    import msgspec
    import torch

    from draftwood.compiler.bundle.build import load_modules
    from draftwood.compiler.drafters.common.layers import TeacherWeights, Waiting
    from draftwood.compiler.drafters.kinds import drafter_of
    from draftwood.compiler.teachers.config import TeacherConfig

    engine, manifest = engines[kind], engines[kind].bundle.manifest
    cache, text = committed(engine, "planned-kv128", prompt, 6)
    engine.draft(cache, engine.bundle.gear("planned-kv128"), text[-1])
    length, order = len(text) - 1, torch.arange(len(text) - 1)
    config = msgspec.convert(manifest.teacher.config, TeacherConfig)
    decoder, drafter = load_modules(engine.bundle.folder / manifest.weights, config, drafter_of(manifest.drafter))
    nothing = torch.zeros(1, dtype=torch.int64)
    ours = [torch.from_numpy(side).flatten(0, 1) for side in cache.draft.sides]
    out = decoder.step(
        torch.tensor(text[:-1]), order, order[None] <= order[:, None], nothing, nothing, nothing[:0],
        torch.zeros(2, 2, 1, 2, 16), [torch.zeros(256, 16) for _ in range(4)], form="eager",
    )  # fmt: skip
    whole = torch.tensor([length])
    teacher = TeacherWeights(decoder.embed.weight, decoder.head_weight)
    waiting = Waiting(torch.tensor(text[1:]), out.features_RF, whole, whole)
    wanted = drafter.extend(waiting, [torch.zeros_like(c) for c in ours], teacher, "eager")
    for mine, theirs in zip(ours, wanted.caches, strict=True):
        slots = cache.draft.sides[0].shape[1]
        difference = mine.view(2, slots, 16)[:, :length] - theirs.view(2, slots, 16)[:, :length]
        assert difference.abs().max() < CLOSE and theirs.abs().max() > 100 * CLOSE


@pytest.mark.parametrize("kind", ["fasteagle", "eagle3"])
def test_rows_that_wait_are_written_in_pieces(
    engines: dict[str, Engine], prompt: list[int], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many rows wait, and whoever writes them, the next draft is the same."""
    engine, gear = engines[kind], engines[kind].bundle.gear("planned-kv128")
    text = (prompt * 3)[:100]
    found = []
    for most in (256, 16, 3, 0):
        monkeypatch.setattr(drafting, "MOST_WAITING", most or 256)
        cache = engine.new_cache(128)
        engine.prefill(cache, np.array(text if most else text[:50]))
        for token in [] if most else text[50:]:  # plain steps: nobody drafts for a while
            engine.verify(cache, np.array([token]), engine.bundle.trees["plain"][1])
            cache.commit([0])
        assert cache.draft.waiting <= (most or 256)
        found.append(engine.draft(cache, gear, 7))
        rows = next(graph.rows for graph in engine.bundle.manifest.graphs if graph.name == gear.draft)
        assert cache.draft.waiting <= (rows or most or 256)
    for other in found[1:]:
        assert np.array_equal(other.tokens_T, found[0].tokens_T)
        np.testing.assert_allclose(other.scores_M, found[0].scores_M, rtol=0, atol=10 * CLOSE)


@pytest.mark.parametrize("kind", ["fasteagle", "eagle3"])
def test_a_cpus_draft_caches_grow_with_the_text(
    tiny_draft_bundles: dict[str, Path], prompt: list[int], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph of any KV length reads all of it, so short texts have short caches; drafts and text stay the same."""
    engine = CpuEngine(Bundle.open(tiny_draft_bundles[kind]))
    found = {}
    for least in (8, 128):
        monkeypatch.setattr(drafting, "LEAST_SLOTS", least)
        cache, text = committed(engine, "planned-kv128", prompt, 8)
        draft = engine.draft(cache, engine.bundle.gear("planned-kv128"), 5)
        found[least] = [text, *(side[:, : cache.length].copy() for side in cache.draft.sides)], draft
        assert cache.draft.sides[0].shape[1] == (64 if least == 8 else 128)
    (short, long), (ours, theirs) = zip(*found.values(), strict=True)
    assert short[0] == long[0] and np.array_equal(ours.tokens_T, theirs.tokens_T)
    for mine, other in zip(short[1:], long[1:], strict=True):
        np.testing.assert_allclose(mine, other, rtol=0, atol=CLOSE)


@pytest.mark.parametrize("kind", ["fasteagle", "eagle3"])
def test_a_draft_depends_on_its_root_and_on_nothing_drafted_before(
    engines: dict[str, Engine], prompt: list[int], kind: str
) -> None:
    engine, gear = engines[kind], engines[kind].bundle.gear("planned-kv128")
    cache = engine.new_cache(128)
    engine.prefill(cache, np.array(prompt))
    first = engine.draft(cache, gear, 9).tokens_T
    other = engine.draft(cache, gear, 33).tokens_T
    assert not np.array_equal(first, other) and np.array_equal(engine.draft(cache, gear, 9).tokens_T, first)
    # The text goes on with another root than was drafted last: the row beside it is written again.
    engine.verify(cache, np.array([33]), engine.bundle.trees["plain"][1])
    cache.commit([0])
    cache.check()
    again = engine.new_cache(128)
    engine.prefill(again, np.array([*prompt, 33]))
    drafts = [engine.draft(one, gear, 5) for one in (cache, again)]
    assert np.array_equal(drafts[0].tokens_T, drafts[1].tokens_T)
    np.testing.assert_allclose(drafts[0].scores_M, drafts[1].scores_M, rtol=0, atol=10 * CLOSE)


@pytest.mark.parametrize("kind", ["fasteagle", "eagle3"])
def test_after_a_rollback_the_text_goes_on(engines: dict[str, Engine], prompt: list[int], kind: str) -> None:
    engine, gear = engines[kind], engines[kind].bundle.gear("planned-kv128")
    cache, text = committed(engine, "planned-kv128", prompt, 5)
    for length in (len(text) - 2, len(prompt) - 3):
        cache.rollback(length)
        cache.check()
        draft = engine.draft(cache, gear, text[length])
        engine.verify(cache, draft.tokens_T, draft.tree)
        cache.commit([0])
        cache.check()
    cache.rollback(0)
    cache.check()
    engine.prefill(cache, np.array(prompt))
    fresh = engine.new_cache(128)
    engine.prefill(fresh, np.array(prompt))
    drafts = [engine.draft(one, gear, 5) for one in (cache, fresh)]
    assert np.array_equal(drafts[0].tokens_T, drafts[1].tokens_T)


def test_a_budget_tree_is_sound_and_follows_the_context(engines: dict[str, Engine], prompt: list[int]) -> None:
    engine = engines["eagle3"]
    gear, shapes = engine.bundle.gear("budget-kv128"), set()
    cache = engine.new_cache(128)
    for at in range(0, 40, 4):
        engine.prefill(cache, np.array(prompt[at : at + 4]))
        draft = engine.draft(cache, gear, at)
        assert violations(draft.tree) == [] and draft.tree.rows == 7 and draft.tree.depth == 3
        assert (draft.scores_M <= 0).all() and draft.tokens_T[0] == at
        shapes.add(tuple(draft.tree.parents.tolist()))
    assert len(shapes) > 1


@pytest.mark.parametrize("tree", [Topology.chain(3), Topology.backbone(3, 3), Topology.full((2, 2))], ids=str)
def test_walking_the_buffers_is_walking_the_tree(tree: Topology) -> None:
    random = np.random.default_rng(0)
    for _ in range(200):
        tokens_T, drawn_T = random.integers(0, 3, (2, tree.rows))
        buffers = tensorize(tree)
        got = walk(buffers, tokens_T, lambda row, depth, drawn=drawn_T: int(drawn[row]))
        assert got == walk_topology(tree, tokens_T.tolist(), lambda row, drawn=drawn_T: int(drawn[row]))


MEDUSA = Drafter(
    kind="medusa", digest="", levels=2, candidates=3, features=2, layers=0, kv_heads=0, head_dim=0, config={}
)


def test_medusa_keeps_the_last_row_alone() -> None:
    cache = DraftCache(MEDUSA, np.zeros)
    cache.append(np.arange(5), np.full((1, 2), 4.0, np.float32))
    cache.open(np.arange(3), np.arange(6, dtype=np.float32).reshape(3, 2))
    cache.commit([0, 2])
    assert cache.waiting == 1 and cache.rows(1, 8)[1].tolist() == [[4.0, 5.0]]
    cache.rollback(3)
    assert cache.waiting == 1


def test_a_commit_needs_a_verify_step() -> None:
    with pytest.raises(InvariantError, match="commit without a verify step"):
        DraftCache(MEDUSA, np.zeros).commit([0])
