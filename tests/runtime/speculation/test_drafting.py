"""Drafters with caches of their own: any tree and engine gives the text of plain decoding, and the caches are right."""

from pathlib import Path

import numpy as np
import pytest

from draftwood.errors import InvariantError
from draftwood.manifest import TokenRows
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.engines.cpu import CpuEngine
from draftwood.runtime.engines.engine import Engine
from draftwood.runtime.engines.static import OnnxStaticEngine
from draftwood.runtime.speculation import drafting
from draftwood.runtime.speculation.draft_cache import DeviceRows, DraftCache
from draftwood.runtime.speculation.kv_cache import KvCache
from draftwood.runtime.speculation.sampling import Sampling
from draftwood.runtime.speculation.sequence import SequenceState
from draftwood.runtime.trace import Trace
from draftwood.tests.decoded import decoded
from draftwood.tools.comparison import single
from draftwood.trees import violations

TREES = ["backbone", "planned"]
CASES = [("fasteagle", tree) for tree in TREES] + [("eagle3", tree) for tree in [*TREES, "budget"]]
SAMPLINGS = {"greedy": Sampling(), "sampled": Sampling(temperature=0.8, top_k=3, seed=11)}
# fp32 through one to three blocks, in another split of the same rows.
CLOSE = 1e-5


@pytest.fixture(scope="module", params=[CpuEngine, OnnxStaticEngine], ids=["cpu", "static"])
def engines(request: pytest.FixtureRequest, tiny_draft_bundles: dict[str, Path]) -> dict[str, Engine]:
    return {kind: request.param(Bundle.open(folder)) for kind, folder in tiny_draft_bundles.items()}


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


@pytest.mark.parametrize("kind", ["fasteagle", "eagle3"])
def test_the_static_engine_runs_static_graphs_alone(
    tiny_draft_bundles: dict[str, Path], prompt: list[int], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a greedy draft's replacement of noise is no input that is sent: it lies there, always the same."""
    engine, ran = OnnxStaticEngine(Bundle.open(tiny_draft_bundles[kind])), []
    run = engine.executor.run
    monkeypatch.setattr(
        engine.drafting, "_run", lambda graph, *given: (ran.append((graph, *given)), run(graph, *given))[1]
    )
    for sampling in SAMPLINGS.values():
        decoded(engine, (prompt * 2)[:40], "planned-kv128", sampling=sampling)
        names = {graph.name for graph, *_ in ran}
        assert {"extend-t16-kv128", "draft-planned-kv128" if kind == "eagle3" else "draft-kv128"} == names
        assert all(graph.static for graph, *_ in ran)
        drafts = [given for graph, *given in ran if graph.kind == "draft"]
        assert all(("noise" in inputs) != sampling.greedy for inputs, _ in drafts)
        assert len({id(buffers.get("noise")) for _, buffers in drafts}) == 1
        ran.clear()


def committed(engine: Engine, gear: str, prompt: list[int], steps: int) -> tuple[SequenceState, list[int]]:
    """A text after some tree steps whose commits take every kind of path; its last token is the root."""
    chosen = engine.bundle.gear(gear)
    state = engine.begin(chosen.slots)
    text = [*prompt, int(engine.prefill(state, np.array(prompt)).choice_R[0])]
    for step in range(steps):
        tokens_T, _, tree, *_ = single.draft(engine, state, chosen, text[-1])
        result = single.verify(engine, state, tokens_T, tree)
        row = (5 * step + tree.rows - 1) % tree.rows
        rows = tree.paths[row, : tree.depths[row] + 1].tolist()
        state.commit(rows)
        state.check()
        text += [*tokens_T[rows[1:]].tolist(), int(result.choice_R[row])]
    return state, text


@pytest.mark.parametrize(("kind", "tree"), [("fasteagle", "planned"), ("eagle3", "planned"), ("eagle3", "budget")])
def test_the_cache_is_that_of_the_accepted_text(
    engines: dict[str, Engine], prompt: list[int], kind: str, tree: str
) -> None:
    engine, gear = engines[kind], f"{tree}-kv128"
    state, text = committed(engine, gear, prompt, 8)
    fresh = engine.begin(128)
    engine.prefill(fresh, np.array(text[:-1]))
    drafts = [single.draft(engine, one, engine.bundle.gear(gear), text[-1]) for one in (state, fresh)]
    assert np.array_equal(drafts[0].tokens_T, drafts[1].tokens_T)
    length = len(text) - 1
    assert len(state.draft.buffers) == {"fasteagle": 6, "eagle3": 2}[kind]
    for ours, theirs in zip(state.draft.buffers, fresh.draft.buffers, strict=True):
        np.testing.assert_allclose(ours[:, :length], theirs[:, :length], rtol=0, atol=CLOSE)
        assert not ours[:, length:-1].any()  # nothing of a draft tree was ever kept


@pytest.mark.parametrize("kind", ["fasteagle", "eagle3"])
def test_a_slot_holds_the_next_token_beside_the_features_of_its_own(
    engines: dict[str, Engine], prompt: list[int], kind: str
) -> None:
    """The networks themselves, over the whole text at once: none of the runtime's bookkeeping is shared."""
    import torch

    from draftwood.compiler.drafters.common.layers import Waiting
    from draftwood.compiler.drafters.registry import drafter_of
    from draftwood.compiler.targets.modules import load_modules
    from draftwood.compiler.teachers.decoder import TeacherEnds
    from draftwood.compiler.teachers.registry import described_config

    engine, manifest = engines[kind], engines[kind].bundle.manifest
    state, text = committed(engine, "planned-kv128", prompt, 6)
    single.draft(engine, state, engine.bundle.gear("planned-kv128"), text[-1])
    length, order = len(text) - 1, torch.arange(len(text) - 1)
    config = described_config(manifest.teacher.config)
    weights = engine.bundle.folder / manifest.graph_set("onnx").weights
    decoder, drafter = load_modules(weights, config, drafter_of(manifest.drafter))
    nothing = torch.zeros(1, dtype=torch.int64)
    ours = [torch.from_numpy(buffer).flatten(0, 1) for buffer in state.draft.buffers]
    out = decoder.step(
        torch.tensor(text[:-1]), order, order[None] <= order[:, None], nothing, nothing, nothing[:0],
        torch.zeros(2, 2, 1, 2, 16), [torch.zeros(256, 16) for _ in range(4)], form="eager",
    )  # fmt: skip
    whole = torch.tensor([length])
    teacher = TeacherEnds(decoder, embeds=True, scores=True)
    waiting = Waiting(torch.tensor(text[1:]), out.features_RF, whole, whole)
    wanted = drafter.extend(waiting, [torch.zeros_like(c) for c in ours], teacher, "eager")
    for mine, theirs in zip(ours, wanted.caches, strict=True):
        slots = state.draft.buffers[0].shape[1]
        difference = mine.view(2, slots, 16)[:, :length] - theirs.view(2, slots, 16)[:, :length]
        assert difference.abs().max() < CLOSE and theirs.abs().max() > 100 * CLOSE


@pytest.mark.parametrize("kind", ["fasteagle", "eagle3"])
def test_rows_that_wait_are_written_in_pieces(
    engines: dict[str, Engine], prompt: list[int], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For any number of waiting rows and any writer, the next draft is the same."""
    engine, gear = engines[kind], engines[kind].bundle.gear("planned-kv128")
    text = (prompt * 3)[:100]
    found = []
    for most in (256, 16, 3, 0):
        monkeypatch.setattr(drafting, "MOST_WAITING", most or 256)
        state = engine.begin(128)
        engine.prefill(state, np.array(text if most else text[:50]))
        for token in [] if most else text[50:]:  # plain steps: nobody drafts for a while
            single.verify(engine, state, np.array([token]), engine.bundle.trees["plain"][1])
            state.commit([0])
        assert state.draft.waiting <= (most or 256)
        found.append(single.draft(engine, state, gear, 7))
        rows = engine.drafting.graph(gear.draft, 128).rows
        assert state.draft.waiting <= (rows or most or 256)
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
        state, text = committed(engine, "planned-kv128", prompt, 8)
        draft = single.draft(engine, state, engine.bundle.gear("planned-kv128"), 5)
        found[least] = [text, *(buffer[:, : state.length].copy() for buffer in state.draft.buffers)], draft
        assert state.draft.buffers[0].shape[1] == (64 if least == 8 else 128)
    (short, long), (ours, theirs) = zip(*found.values(), strict=True)
    assert short[0] == long[0] and np.array_equal(ours.tokens_T, theirs.tokens_T)
    for mine, other in zip(short[1:], long[1:], strict=True):
        np.testing.assert_allclose(mine, other, rtol=0, atol=CLOSE)


@pytest.mark.parametrize("kind", ["fasteagle", "eagle3"])
def test_a_draft_depends_on_its_root_and_on_nothing_drafted_before(
    engines: dict[str, Engine], prompt: list[int], kind: str
) -> None:
    engine, gear = engines[kind], engines[kind].bundle.gear("planned-kv128")
    state = engine.begin(128)
    engine.prefill(state, np.array(prompt))
    first, other, again = (single.draft(engine, state, gear, root).tokens_T for root in (9, 33, 9))
    assert not np.array_equal(first, other) and np.array_equal(again, first)
    # The text goes on with another root than was drafted last: the row next to it is written again.
    single.draft(engine, state, gear, 9)
    single.verify(engine, state, np.array([33]), engine.bundle.trees["plain"][1])
    state.commit([0])
    state.check()
    fresh = engine.begin(128)
    engine.prefill(fresh, np.array([*prompt, 33]))
    drafts = [single.draft(engine, one, gear, 5) for one in (state, fresh)]
    assert np.array_equal(drafts[0].tokens_T, drafts[1].tokens_T)
    np.testing.assert_allclose(drafts[0].scores_M, drafts[1].scores_M, rtol=0, atol=10 * CLOSE)


@pytest.mark.parametrize("kind", ["fasteagle", "eagle3"])
def test_after_a_rollback_the_text_goes_on(engines: dict[str, Engine], prompt: list[int], kind: str) -> None:
    engine, gear = engines[kind], engines[kind].bundle.gear("planned-kv128")
    state, text = committed(engine, "planned-kv128", prompt, 5)
    for length in (len(text) - 2, len(prompt) - 3):
        state.rollback(length)
        state.check()
        draft = single.draft(engine, state, gear, text[length])
        single.verify(engine, state, draft.tokens_T, draft.tree)
        state.commit([0])
        state.check()
    state.rollback(0)
    state.check()
    engine.prefill(state, np.array(prompt))
    fresh = engine.begin(128)
    engine.prefill(fresh, np.array(prompt))
    drafts = [single.draft(engine, one, gear, 5) for one in (state, fresh)]
    assert np.array_equal(drafts[0].tokens_T, drafts[1].tokens_T)


def test_a_budget_tree_is_sound_and_follows_the_context(engines: dict[str, Engine], prompt: list[int]) -> None:
    engine = engines["eagle3"]
    gear, shapes = engine.bundle.gear("budget-kv128"), set()
    state = engine.begin(128)
    for at in range(0, 40, 4):
        engine.prefill(state, np.array(prompt[at : at + 4]))
        draft = single.draft(engine, state, gear, at)
        assert violations(draft.tree) == [] and draft.tree.rows == 7 and draft.tree.depth == 3
        assert (draft.scores_M <= 0).all() and draft.tokens_T[0] == at
        shapes.add(tuple(draft.tree.parents.tolist()))
    assert len(shapes) > 1


ROWS = [TokenRows(name=name, heads=1, width=1) for name in ("draft_key_cache.0", "draft_value_cache.0")]


def test_rows_on_a_device_are_read_back_only_where_others_wait_beside_them() -> None:
    reads: list[np.ndarray] = []
    cache = DraftCache(ROWS, 2, lambda shape: np.ones(shape, np.float32))

    def appended(tokens: list[int]) -> None:
        buffer = cache.next_rows(3)
        buffer[: len(tokens)] = np.array(tokens)[:, None]
        cache.append(np.array(tokens), DeviceRows(buffer, len(tokens), lambda rows: reads.append(rows) or rows.copy()))

    appended([5, 6])
    assert cache.on_device is not None and cache.after(2, 9).tolist() == [6, 9] and not reads
    cache.drafted(7)
    appended([7])
    assert cache.waiting == 1 and cache.length == 2 and cache.on_device is not None and not reads
    appended([8])
    appended([4])
    assert cache.on_device is None and cache.features(3)[:, 0].tolist() == [7, 8, 4]


def test_medusa_keeps_the_last_row_alone() -> None:
    cache = DraftCache((), 2, np.zeros)
    cache.append(np.arange(5), np.full((1, 2), 4.0, np.float32))
    cache.append(np.array([0, 2]), np.array([[0, 1], [4, 5]], np.float32))
    assert cache.waiting == 1 and cache.features(1).tolist() == [[4.0, 5.0]]
    cache.rollback(3)
    assert cache.waiting == 1


def test_a_commit_needs_a_verify_step() -> None:
    with pytest.raises(InvariantError, match="commit without a verify step"):
        SequenceState(KvCache(ROWS, 128)).commit([0])
