"""``--bitwise``: a row's bits do not depend on its place in a tree, its neighbours, the length or the gears before."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

import draftwood
from draftwood import manifest as manifest_module
from draftwood.compiler.bundle.build import _fitting, build, chains_only
from draftwood.compiler.bundle.request import BuildRequest, check_request
from draftwood.compiler.teachers.checkpoint import Checkpoint
from draftwood.errors import BundleError, RequestError, TreeError
from draftwood.manifest import BLOCK_SLOTS
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.decoding import Decoding
from draftwood.runtime.engines.bitwise import BitwiseEngine
from draftwood.runtime.engines.cpu import CpuEngine
from draftwood.runtime.engines.engine import Engine
from draftwood.runtime.engines.opening import Opening
from draftwood.runtime.options import Options
from draftwood.runtime.policy import FixedTree
from draftwood.runtime.proof import prove
from draftwood.runtime.speculation.sequence import SequenceState
from draftwood.tests.packed_checkpoints import save_packed
from draftwood.tools.comparison import single
from draftwood.trees import Topology, TreeBuffers, tensorize
from draftwood.trees.spec import read_specs

KINDS = ("medusa", "eagle3", "fasteagle")
# Lengths around the border of a block, and of nothing that is settled yet.
LENGTHS = (1, BLOCK_SLOTS - 3, BLOCK_SLOTS - 1, BLOCK_SLOTS, 2 * BLOCK_SLOTS - 2)
TREES = {
    "chain": Topology.chain(6),
    "wide": Topology.full((6,)),
    "full": Topology.full((2, 2)),
    "last": Topology.from_paths([(0,), (1,), (1, 0), (1, 1), (1, 1, 0), (1, 1, 3)]),
}
PLAIN = tensorize(Topology.plain())


@pytest.fixture(scope="module")
def bundles(tiny_bundles: dict[str, Path]) -> dict[str, Bundle]:
    return {kind: Bundle.open(folder) for kind, folder in tiny_bundles.items()}


@pytest.fixture(scope="module")
def engine(bundles: dict[str, Bundle]) -> BitwiseEngine:
    return BitwiseEngine(bundles["medusa"], Opening(threads=1))


def behind(engine: Engine, text: NDArray[np.int64]) -> SequenceState:
    state = engine.begin(256)
    engine.prefill(state, text)
    return state


def bits(logits: NDArray[np.float32]) -> NDArray[np.int32]:
    return logits.copy().view(np.int32)


def plain_rows(engine: Engine, text: NDArray[np.int64], tokens: list[int]) -> NDArray[np.int32]:
    """Bits of plain decoding's logits at each of the tokens after a text."""
    state, rows = behind(engine, text), []
    for token in tokens:
        rows.append(bits(single.verify(engine, state, np.array([token]), PLAIN).logits_RV[0]))
        state.commit([0])
    return np.stack(rows)


def differing(engine: Engine, length: int, tree: TreeBuffers) -> list[int]:
    """Rows of a tree after a text that have other bits than plain decoding of their own path."""
    random = np.random.default_rng(length)
    text, tokens_T = random.integers(2, 300, length), random.integers(2, 300, tree.rows)
    got = bits(single.verify(engine, behind(engine, text), tokens_T, tree).logits_RV)
    paths = [tree.paths[row, : tree.depths[row] + 1] for row in range(tree.rows)]
    plain = [plain_rows(engine, text, tokens_T[path].tolist()) for path in paths]
    return [row for row in range(tree.rows) if not np.array_equal(got[row], plain[row][-1])]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("tree", TREES)
def test_place(engine: BitwiseEngine, tree: str, length: int) -> None:
    assert differing(engine, length, tensorize(TREES[tree])) == []


def test_place_with_several_threads(engine: BitwiseEngine, bundles: dict[str, Bundle]) -> None:
    several, text, tokens = BitwiseEngine(bundles["medusa"], Opening(threads=3)), np.arange(2, 90), [5, 6, 7]
    assert differing(several, len(text), tensorize(TREES["full"])) == []
    assert np.array_equal(plain_rows(several, text, tokens), plain_rows(engine, text, tokens))


@pytest.fixture(scope="module")
def in_four_bits(save_tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> BitwiseEngine:
    folder = tmp_path_factory.mktemp("four")
    (folder / "teacher").mkdir()
    save_packed(save_tiny(folder / "teacher"), folder / "packed", "awq")
    trees = read_specs("lookup:full:2x2").trees
    asked = BuildRequest(
        model=folder / "packed", drafter=None, trees=trees, slots=(256,), prefill_rows=(), precision="nbits",
        bitwise=True,
    )  # fmt: skip
    build(asked, folder / "bundle")
    return BitwiseEngine(Bundle.open(folder / "bundle"), Opening(threads=1))


@pytest.mark.parametrize("length", LENGTHS)
def test_place_in_four_bits(in_four_bits: BitwiseEngine, length: int) -> None:
    """A product of packed weights may sum a row in another order alone, as without AVX-512."""
    assert differing(in_four_bits, length, tensorize(TREES["full"])) == []


def test_the_other_engine_differs(bundles: dict[str, Bundle]) -> None:
    # Else the tests here could not fail.
    assert differing(CpuEngine(bundles["medusa"], Opening(threads=1)), 50, tensorize(TREES["full"]))


@pytest.mark.parametrize("length", LENGTHS)
def test_poison(engine: BitwiseEngine, length: int) -> None:
    """Other rows, and slots that no text has reached, do not matter."""
    tree, random = tensorize(TREES["last"]), np.random.default_rng(1)
    text, tokens_T = random.integers(2, 300, length), random.integers(2, 300, tree.rows)
    want = bits(single.verify(engine, behind(engine, text), tokens_T, tree).logits_RV)
    path = tree.paths[-1].tolist()
    spoiled_T = random.integers(2, 300, tree.rows)
    spoiled_T[path] = tokens_T[path]
    state = behind(engine, text)
    for buffer in state.kv.buffers:
        for slot in range(length, 256):
            buffer[slot // BLOCK_SLOTS, :, slot % BLOCK_SLOTS] = 1e4
    got = bits(single.verify(engine, state, spoiled_T, tree).logits_RV)
    assert np.array_equal(got[path], want[path])


def test_prompt_rows_have_the_bits_of_decoding(engine: BitwiseEngine) -> None:
    text = np.random.default_rng(2).integers(2, 300, 150)
    plain = plain_rows(engine, text[:40], text[40:].tolist())
    for length in (41, 64, 65, 128, 129, 150):
        state = engine.begin(256)
        assert np.array_equal(bits(engine.prefill(state, text[:length]).logits_RV[0]), plain[length - 41])


def test_churn(engine: BitwiseEngine) -> None:
    """Another tree and path at every step, over the border of three blocks and a cache that grows."""
    random = np.random.default_rng(3)
    text = random.integers(2, 300, 230)
    plain = plain_rows(engine, text[:20], text[20:].tolist())
    trees, at, state = [tensorize(tree) for tree in TREES.values()], 20, engine.begin(128)
    engine.prefill(state, text[:20])
    while at < len(text) - 7:
        if at + 20 > state.slots:
            state.grow(256)
        tree = trees[random.integers(len(trees))]
        row = int(random.integers(tree.rows))
        path = tree.paths[row, : tree.depths[row] + 1].tolist()
        tokens_T = random.integers(2, 300, tree.rows)
        tokens_T[path] = text[at : at + len(path)]
        got = bits(single.verify(engine, state, tokens_T, tree).logits_RV[path])
        assert np.array_equal(got, plain[at - 20 : at - 20 + len(path)]), (at, path)
        state.commit(path)
        state.check()
        at += len(path)


@pytest.mark.parametrize("temperature", [0.0, 0.9], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", KINDS)
def test_texts(bundles: dict[str, Bundle], kind: str, temperature: float) -> None:
    bundle = bundles[kind]
    engine, prompt = BitwiseEngine(bundle, Opening(threads=1)), np.random.default_rng(4).integers(2, 300, 55).tolist()
    options = Options.of(max_new_tokens=40, temperature=temperature, top_p=0.95, seed=7, ignore_eos=True)
    texts = [
        Decoding(engine, prompt, options, FixedTree(bundle, gear.name)).run().token_ids
        for gear in bundle.manifest.gears
        if gear.draft
    ]
    plain = Decoding(engine, prompt, options, FixedTree(bundle)).run().token_ids
    assert len(texts) >= 2 and set(texts) == {plain}


@pytest.mark.parametrize("kind", KINDS)
def test_the_proof_passes(bundles: dict[str, Bundle], kind: str) -> None:
    prove(BitwiseEngine(bundles[kind], Opening(threads=1)))


class BySlot(BitwiseEngine):
    """Takes a slot's place for its token's."""

    def _order_of(self, kv, depths_T, mask_TT):  # type: ignore[no-untyped-def]
        return super()._order_of(kv, np.arange(len(depths_T)), mask_TT)


def test_the_proof_refuses_other_bits(bundles: dict[str, Bundle]) -> None:
    with pytest.raises(BundleError, match=r"ragged.* other bits .*than plain decoding's"):
        prove(BySlot(bundles["medusa"], Opening(threads=1)))


def test_a_bundle_without_the_graph_is_refused(bundles: dict[str, Bundle]) -> None:
    bundle = bundles["medusa"]
    (graphs,) = bundle.manifest.graph_sets
    kept = tuple(graph for graph in graphs.graphs if graph.kind != "bitwise")
    manifest = msgspec.structs.replace(bundle.manifest, graph_sets=(msgspec.structs.replace(graphs, graphs=kept),))
    with pytest.raises(
        BundleError, match="no graph for --engine bitwise; build it with --bitwise, or take --engine cpu"
    ):
        BitwiseEngine(Bundle(bundle.folder, manifest, bundle.trees, bundle.files, bundle.verified))


@pytest.mark.parametrize("size", ["width", "branch_rows"])
def test_sizes_that_cut_sums_elsewhere_are_refused(bundles: dict[str, Bundle], size: str) -> None:
    bundle, changed = bundles["medusa"], msgspec.structs.replace
    manifest = bundle.manifest
    if size == "width":
        wide = tuple(changed(rows, width=256) for rows in manifest.teacher.buffers)
        manifest = changed(manifest, teacher=changed(manifest.teacher, buffers=wide))
    else:
        manifest = changed(manifest, dims=changed(manifest.dims, branch_rows=200))
    with pytest.raises(BundleError, match=r"bitwise: .* expected at most 1"):
        BitwiseEngine(Bundle(bundle.folder, manifest, bundle.trees, bundle.files, bundle.verified))


def test_such_sizes_are_refused_before_a_build(
    quantised_teacher: Path, tiny_heads: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A branching tree over rows in int8 brings the step by itself, and would make a bundle that does not open."""
    monkeypatch.setattr(manifest_module, "MOST_BLOCKS", 1)
    trees = (("plain", Topology.plain()), ("full", TREES["full"]))
    asked = BuildRequest(model=quantised_teacher, drafter=tiny_heads, trees=trees, slots=(128,), prefill_rows=())
    with pytest.raises(TreeError, match=r"tree full: branches, .*KV length 128; expected at most 64, .*give chains"):
        build(asked, tmp_path / "bundle")
    with pytest.raises(RequestError, match=r"--bitwise: KV length 128; expected at most 64, .*leave it out"):
        build(replace(asked, bitwise=True), tmp_path / "bundle")
    # Such a tree is an NPU's.
    assert not _fitting(replace(asked, targets=("onnx", "ge")))[0].bitwise
    config = Checkpoint.open(quantised_teacher).config
    assert chains_only(config, ("onnx",), 1, 128) and not chains_only(config, ("onnx",), 1, 64)


def test_opening_for_it(tiny_bundle: Path) -> None:
    with draftwood.open(tiny_bundle, threads=1, engine="bitwise") as model:
        assert isinstance(model.engine, BitwiseEngine)
        kept = {policy: model.generate([5, 6, 7], policy=policy, max_new_tokens=9) for policy in ("plain", "adaptive")}
        assert kept["plain"].token_ids == kept["adaptive"].token_ids


def test_building_it_for_an_npu_alone_is_refused(tmp_path: Path) -> None:
    request = BuildRequest(
        model=tmp_path, drafter=None, trees=(("plain", Topology.plain()),), slots=(128,), prefill_rows=(16,),
        targets=("ge",), bitwise=True,
    )  # fmt: skip
    with pytest.raises(RequestError, match="--bitwise: is a step for CPUs"):
        check_request(request, tmp_path / "out")
