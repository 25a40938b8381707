"""A teacher and a drafter that declare other memory than keys and values of one size; no file of the runtime changes.

Both are numpy functions behind an `Executor`. The teacher keeps three buffers of different heads and widths, one of
them for a layer alone as latent rows would be, and reads the text from all of them; so does the drafter from its two.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from draftwood import manifest as m
from draftwood.compiler.steps.step import signed
from draftwood.compiler.steps.teacher import static_caches
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.bundle.references import faults
from draftwood.runtime.caches import Caches, Wanted
from draftwood.runtime.engines.static import StaticEngine
from draftwood.runtime.speculation.kv_cache import Buffer, host_zeros
from draftwood.runtime.speculation.sampling import Sampling
from draftwood.runtime.trace import Trace
from draftwood.tests.decoded import decoded
from draftwood.trees import Topology, tensorize

VOCABULARY, LENGTHS, CHUNK, WIDTH = 31, (32, 96), 8, 2


def rows(name: str, heads: int, width: int) -> m.TokenRows:
    return m.TokenRows(name=name, heads=heads, width=width)


BUFFERS = (rows("key_cache.0", 2, 4), rows("value_cache.0", 2, 3), rows("latent_cache.1", 1, 5))
OF_DRAFTER = (rows("draft_key_cache.0", 1, 2), rows("draft_value_cache.0", 3, 1))
ROW = sum(each.elements() for each in BUFFERS)
TREES = {"plain": Topology.plain(), "tree": Topology.from_paths([(0,), (1,), (0, 0), (1, 0)])}
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


def following(before: int, token: int) -> int:
    return (3 * token + 5 * before + 1) % VOCABULARY


def graphs() -> tuple[m.GraphSignature, ...]:
    steps = []
    for slots in LENGTHS:
        of_teacher, of_drafter = static_caches(BUFFERS, slots), static_caches(OF_DRAFTER, slots)
        for kind, count in (("prefill", CHUNK), ("decode", 1), ("verify", 5)):
            sizes = {"T": count, "R": 1 if kind == "prefill" else count, "X": count, "V": VOCABULARY, "W": WIDTH}
            sizes |= {"P": 3, "J": (5, ROW)}
            name = f"{kind}-t{count}-kv{slots}"
            steps.append(signed(name, kind, sizes, of_teacher, rows=count, slots=slots))
        small = {"N": CHUNK, "W": WIDTH, "D": 2, "K": 2, "Q": 1, "H": 1}
        for kind, parts in (("extend", {"cached"}), ("draft", {"cached", "ranked"})):
            name = f"{kind}-kv{slots}"
            steps.append(signed(name, kind, small, of_drafter, rows=CHUNK, slots=slots, parts=parts))
    return tuple(step.frozen_in(f"onnx/{step.name}.onnx") for step in steps)


def manifest() -> m.Manifest:
    every = graphs()
    files = [graph.file for graph in every] + [f"trees/{name}.json" for name in TREES] + ["weights"]
    gears = [
        m.Gear(name=f"{tree}-kv{slots}", tree=tree, slots=slots, graph=f"{graph}-kv{slots}", draft=draft)
        for slots in LENGTHS
        for tree, graph, draft in (("plain", "decode-t1", None), ("tree", "verify-t5", "draft"))
    ]
    trees = [
        m.Tree(name=name, file=f"trees/{name}.json", rows=tree.rows, depth=tree.depth, width=tree.width)
        for name, tree in TREES.items()
    ]
    return m.Manifest(
        schema_version=m.SCHEMA_VERSION,
        dims=m.Dims(hidden=1, heads=2, vocabulary=VOCABULARY, branch_rows=5, path_rows=3, context=LENGTHS[-1] - 1),
        teacher=m.Teacher(digest="0" * 64, bos=None, eos=(), buffers=BUFFERS, config={}),
        drafter=m.Drafter(
            kind="toy", digest="0" * 64, levels=2, candidates=2, features=WIDTH, buffers=OF_DRAFTER, config={}
        ),
        trees=tuple(trees),
        gears=tuple(gears),
        graph_sets=(
            m.GraphSet(
                target="onnx", rank=0, ranks=1, weights="weights", index=None, soc=None, graphs=every,
                precision=m.Precision(name="fp32", weights="float32", activations="float32", caches="float32"),
            ),
        ),
        tokenizer=False,
        provenance={},
        files={name: m.File(bytes=0, sha256="0" * 64) for name in files},
    )  # fmt: skip


class Toy:
    """Runs the teacher and the drafter. A buffer's row is its token and the buffer's number, in all of its places."""

    zeros = staticmethod(host_zeros)
    read = staticmethod(np.asarray)

    def run(self, graph: m.GraphSignature, inputs: dict[str, NDArray], buffers: dict[str, Buffer]) -> dict:
        caches = [buffers[name] for name in graph.caches]
        if graph.kind in ("extend", "draft"):
            return self.drafted(inputs, caches)
        committed, moved = int(inputs["committed"][0]), int(inputs["accepted"][0])
        for place, row in enumerate(inputs["path"][:moved]):
            parts = np.split(buffers["branch"][row], np.cumsum([each.elements() for each in BUFFERS])[:-1])
            for cache, part in zip(caches, parts, strict=True):
                cache[:, committed - moved + place] = part.reshape(cache.shape[0], -1)
        tokens = inputs["tokens"]
        for number, cache in enumerate(caches):
            cache[:, committed : committed + len(tokens)] = tokens[None, :, None] + 100 * number
        if "branch.out" in buffers:
            of_row = np.concatenate([np.full(each.elements(), 100 * n) for n, each in enumerate(BUFFERS)])
            buffers["branch.out"][: len(tokens)] = tokens[:, None] + of_row
        seen = inputs.get("visible", np.tri(len(tokens), dtype=bool))
        text = self.text(caches, committed)
        nexts = [following(*(text + tokens[row].tolist())[-2:]) for row in map(np.flatnonzero, seen)]
        chosen = nexts if graph.kind != "prefill" else [nexts[inputs["last"][0]]]
        features = np.repeat(tokens[:, None], WIDTH, 1).astype(np.float32)
        return {
            "logits": np.eye(VOCABULARY, dtype=np.float32)[chosen],
            "choice": np.array(chosen),
            "features": features,
        }

    @staticmethod
    def text(caches: list[Buffer], length: int) -> list[int]:
        """The committed tokens, which every place of every buffer has to hold."""
        tokens = caches[0][0, :length, 0]
        for number, cache in enumerate(caches):
            assert (cache[:, :length] == tokens[None, :, None] + 100 * number).all()
        return [0] * (2 - length) + tokens.astype(int).tolist()

    @staticmethod
    def drafted(inputs: dict[str, NDArray], caches: list[Buffer]) -> dict[str, NDArray]:
        """Keys are features, values the tokens after them; every third root is followed by the second candidate."""
        committed, count = int(inputs["committed"][0]), int(inputs["accepted"][0])
        caches[0][0, committed - count : committed] = inputs["features"][:count]
        caches[1][:, committed - count : committed, 0] = inputs["tokens"][:count]
        assert (caches[0][0, 1:committed, 0] == caches[1][2, : committed - 1, 0]).all()  # nothing is missing between
        root = int(caches[1][2, committed - 1, 0])
        first = following(int(caches[0][0, committed - 1, 1]), root)
        other = (first + 1) % VOCABULARY
        best = [first, other] if root % 3 else [other, first]
        scores = np.array([[-0.5, -1.5], [-0.6, -2.0]], np.float32)
        return {"candidates": np.array([best, [following(root, first), other]]), "scores": scores, "hidden": scores}


@pytest.fixture
def engine() -> StaticEngine:
    trees = {name: (tree, tensorize(tree)) for name, tree in TREES.items()}
    bundle = Bundle(Path("toy"), manifest(), trees, None, "full")  # type: ignore[arg-type]
    return StaticEngine(bundle, bundle.manifest.graphs_of("onnx"), Toy())


def test_such_a_manifest_holds_together() -> None:
    assert list(faults(manifest())) == []


@pytest.mark.parametrize("number", range(len(BUFFERS)))
def test_a_buffer_of_another_size_than_declared_is_refused(number: int) -> None:
    change: Callable = m.msgspec.structs.replace
    whole = manifest()
    wider = [change(each, width=each.width + (i == number)) for i, each in enumerate(BUFFERS)]
    other = change(whole, teacher=change(whole.teacher, buffers=tuple(wider)))
    assert any(BUFFERS[number].name in fault for fault in faults(other))


def test_the_text_is_that_of_plain_decoding(engine: StaticEngine) -> None:
    """Through moved rows, a larger KV length, and a plain step where no tree fits."""
    trace = Trace()
    speculative = decoded(engine, PROMPT, "tree-kv32", trace, max_new_tokens=80)
    plain = decoded(engine, PROMPT, "plain-kv32", max_new_tokens=80)
    text = [*PROMPT]
    for _ in range(80):
        text.append(following(*text[-2:]))
    assert list(speculative.token_ids) == list(plain.token_ids) == text[len(PROMPT) :]
    paths = {event.path for event in trace.events if event.path}
    assert {(0, 0), (1, 0)} <= paths and speculative.steps < 35


def test_a_prompt_that_begins_alike_starts_after_a_copy(engine: StaticEngine) -> None:
    """The bytes that the budget counts are those of all buffers."""
    state = engine.begin(LENGTHS[0], Sampling())
    engine.start(state, np.array(PROMPT * 2))
    numbers = LENGTHS[0] * ROW + 2 * 5 * ROW
    assert state.kv.bytes == 4 * numbers
    copied = state.copied(len(PROMPT), LENGTHS[1])
    engine.start(copied, np.array([7, 8]))
    fresh = engine.begin(LENGTHS[1], Sampling())
    engine.start(fresh, np.array([*PROMPT, 7, 8]))
    assert copied.root == fresh.root == following(7, 8)
    for ours, theirs in zip(copied.kv.buffers, fresh.kv.buffers, strict=True):
        np.testing.assert_array_equal(ours[:, : len(PROMPT) + 2], theirs[:, : len(PROMPT) + 2])


def test_the_budget_counts_every_buffer(engine: StaticEngine) -> None:
    caches = Caches(engine)
    state = caches.admit(Wanted(PROMPT, 60, LENGTHS[1], Sampling()))
    assert state is not None and caches.running_bytes >= 4 * (LENGTHS[1] * ROW + 2 * 5 * ROW)
