"""The reference mode: the branch cache against fresh ones, trees against plain text, and faults that must be named."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from draftwood.errors import CheckpointError, InvariantError
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.decoding import Decoding
from draftwood.runtime.engines.cpu import CpuEngine
from draftwood.runtime.options import Options
from draftwood.runtime.policy import FixedTree, widest_gear
from draftwood.runtime.speculation.sampling import Sampling
from draftwood.runtime.trace import Trace
from draftwood.tools.cli import main
from draftwood.tools.comparison import single
from draftwood.tools.comparison.texts import check_texts, compare_texts
from draftwood.tools.reference.branch_cache import BranchCache
from draftwood.tools.reference.eager import EagerEngine
from draftwood.tools.reference.hf_teacher import HfTeacher
from draftwood.tools.reference.invariants import LOOKED_AT
from draftwood.tools.reference.transformers import HfEngine
from draftwood.trees import Topology, tensorize

# fp32 against fp32 with sums in another order; logits and cache values are of magnitude up to 10. Measured: 4e-6.
FP32 = 1e-4
VOCABULARY = 300
TREE = tensorize(Topology.from_paths([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 1, 0)]))
# Row numbers of TREE's paths by their last row: (0, 1, 5, 7) is not in place from its third row on.
PATHS = [tuple(dict.fromkeys(TREE.paths[row].tolist())) for row in range(TREE.rows)]
PROMPT = [5, 9, 23, 41, 7]


@pytest.fixture(scope="module")
def teacher(tiny_teacher: Path) -> HfTeacher:
    return HfTeacher.open(tiny_teacher)


@pytest.fixture(scope="module")
def bundle(tiny_bundle: Path) -> Bundle:
    return Bundle.open(tiny_bundle)


def prefilled(teacher: HfTeacher, text: list[int]) -> BranchCache:
    cache = teacher.new_cache(64)
    causal = np.tri(len(text), dtype=np.bool_)
    teacher.step(cache, np.array(text), np.arange(len(text)), causal)
    cache.commit(range(len(text)))
    return cache


def rows_of(cache: BranchCache) -> torch.Tensor:
    """All committed rows, [2 L, K, length, D], copied."""
    return torch.stack([buffer[:, : cache.length] for buffer in cache.buffers]).clone()


def plain_logits(teacher: HfTeacher, ids: list[int]) -> torch.Tensor:
    """The oracle: the last logits of a text without cache, mask or positions of ours."""
    with torch.no_grad():
        return teacher.model(torch.tensor([ids])).logits[0, -1]


# What is done to a cache: a tree step that commits the path to a row, or drops it (None); or a rollback by n tokens.
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("step"), st.one_of(st.none(), st.integers(0, TREE.rows - 1)), st.integers(0, 10**6)),
        st.tuples(st.just("back"), st.integers(0, 3), st.just(0)),
    ),
    min_size=3,
    max_size=8,
)


@given(STEPS)
@hypothesis_settings(max_examples=25)
def test_any_history_leaves_what_a_fresh_cache_holds(teacher: HfTeacher, history: list[tuple[str, Any, int]]) -> None:
    cache = prefilled(teacher, PROMPT)
    text = list(PROMPT)
    for what, value, seed in history:
        before = rows_of(cache)
        if what == "back":
            text = text[: max(1, len(text) - value)]
            cache.rollback(len(text))
        else:
            tokens = np.random.default_rng(seed).integers(0, VOCABULARY, TREE.rows)
            teacher.step(cache, tokens, TREE.depths, TREE.mask)
            if value is None:
                cache.rollback(cache.length)
            else:
                cache.commit(PATHS[value])
                text += tokens[list(PATHS[value])].tolist()
        cache.check()
        kept = min(before.shape[2], cache.length)
        assert torch.equal(rows_of(cache)[:, :, :kept], before[:, :, :kept])  # committed rows: bit for bit
    assert cache.text == text and cache.length == len(text)
    fresh = rows_of(prefilled(teacher, text))
    assert (rows_of(cache) - fresh).abs().max() <= FP32


def stepped(teacher: HfTeacher) -> BranchCache:
    cache = prefilled(teacher, PROMPT)
    teacher.step(cache, np.arange(TREE.rows), TREE.depths, TREE.mask)
    return cache


def poke(cache: BranchCache, buffer: int, slot: int, value: float) -> None:
    cache.buffers[buffer][0, slot, 0] = value


def shorten(cache: BranchCache) -> None:
    cache.text.pop()


def write_again(cache: BranchCache) -> None:
    rows = cache.buffers[0][None, :, : cache.open_rows].clone()
    cache.update(rows, rows, 0)


def one_layer_only(cache: BranchCache) -> None:
    cache.rollback(cache.length)
    cache.open([1], [cache.length])
    rows = cache.buffers[0][None, :, :1].clone()
    cache.update(rows, rows, 0)
    cache.commit([0])


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        (lambda cache: poke(cache, 3, 2, 0.5), "committed: layer 1, value: slot 2"),
        (lambda cache: poke(cache, 0, 4, float("nan")), "committed: layer 0, key: slot 4"),
        (shorten, "text: 5 rows are committed for 4 tokens"),
        (lambda cache: cache.commit([0, 2, 1]), "path: expected rising rows"),
        (lambda cache: cache.commit([1]), "path: expected rising rows"),
        (lambda cache: cache.commit([0, 1, 2]), "position: row 2 was computed at 6, its slot is 7"),
        (lambda cache: cache.open([1], [5]), "branch-open: 8 rows are open"),
        (write_again, "write-once: layer 0"),
        (one_layer_only, "unwritten: layer 1 has written 0 of 1 rows"),
        (lambda cache: cache.rollback(6), "rollback: expected 0 to 5, got 6"),
    ],
)
def test_a_broken_invariant_is_named(teacher: HfTeacher, fault: Callable[[BranchCache], None], name: str) -> None:
    cache = stepped(teacher)
    cache.check()
    with pytest.raises(InvariantError, match=name):
        fault(cache)
        cache.check()


def test_a_tree_computes_what_its_paths_compute_as_plain_text(teacher: HfTeacher) -> None:
    cache = prefilled(teacher, PROMPT)
    tokens = np.random.default_rng(3).integers(0, VOCABULARY, TREE.rows)
    step = teacher.step(cache, tokens, TREE.depths, TREE.mask)
    for row, path in enumerate(PATHS):
        want = plain_logits(teacher, [*PROMPT, *tokens[list(path)].tolist()])
        assert (step.logits_RV[row] - want).abs().max() <= FP32
    causal = teacher.step(prefilled(teacher, PROMPT), tokens, TREE.depths, np.tri(TREE.rows, dtype=np.bool_))
    assert (causal.logits_RV - step.logits_RV).abs().max() > 100 * FP32  # a wrong mask stands out


def test_features_are_the_normed_state_or_the_states_that_enter_layers(teacher: HfTeacher) -> None:
    tokens = np.array(PROMPT)
    order = np.arange(len(PROMPT))
    normed = teacher.step(teacher.new_cache(8), tokens, order, order[None] <= order[:, None])
    assert torch.equal(teacher.model.lm_head(normed.features_TF), normed.logits_RV)
    tapped = HfTeacher(teacher.model, taps=(0, 1, 2))
    step = tapped.step(tapped.new_cache(8), tokens, order, order[None] <= order[:, None], last_only=True)
    entering: list[torch.Tensor] = []
    hooks = [
        part.register_forward_pre_hook(lambda _, given: entering.append(given[0]))
        for part in (*teacher.model.model.layers, teacher.model.model.norm)
    ]
    teacher.step(teacher.new_cache(8), tokens, order, order[None] <= order[:, None])
    for hook in hooks:
        hook.remove()
    assert torch.equal(step.features_TF, torch.cat(entering, dim=-1)[0])
    assert step.logits_RV.shape == (1, VOCABULARY) and torch.allclose(
        step.logits_RV[0], normed.logits_RV[-1], atol=FP32
    )
    with pytest.raises(CheckpointError, match="expected 0 to 2"):
        HfTeacher(teacher.model, taps=(3,))


def test_all_engines_give_one_text(tiny_bundle: Path, tiny_teacher: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(tiny_bundle), "--teacher", str(tiny_teacher)]) == 0
    assert capsys.readouterr().out.count("2 of 2 prompts equal") == 2
    found = json.loads((tiny_bundle / "check-teacher.json").read_text())
    assert found["ok"] and [report["temperature"] for report in found["texts"]] == [0.0, 0.8]
    for report in found["texts"]:
        assert report["ok"] and report["equal"] == report["prompts"] == 2 and report["tokens"] > 1
        assert all(one["differences"] == [] for one in report["per_prompt"])


def test_speculation_on_transformers_takes_fewer_steps(bundle: Bundle, teacher: HfTeacher) -> None:
    """Or its equality with plain decoding would prove nothing."""
    engine = HfEngine(bundle, teacher)
    options = Options(max_new_tokens=40, ignore_eos=True)
    gears = (FixedTree(bundle), FixedTree(bundle, widest_gear(bundle)))
    plain, tree = (Decoding(engine, PROMPT, options, policy).run() for policy in gears)
    assert plain.token_ids == tree.token_ids and tree.steps < plain.steps == 39


@pytest.mark.parametrize("kind", ["eagle3", "fasteagle"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafters_with_caches_draft_alike_from_transformers_features(
    tiny_draft_bundles: dict[str, Path], teacher: HfTeacher, kind: str, temperature: float
) -> None:
    """Equal steps, since a drafter with wrong features would change no token, only draft worse."""
    bundle = Bundle.open(tiny_draft_bundles[kind])
    reference, compiled = HfEngine(bundle, teacher), CpuEngine(bundle)
    slots = max(gear.slots for gear in bundle.manifest.gears)
    prompt = [*PROMPT * 20] if slots > 128 else PROMPT  # with room, through a change of the KV length
    texts = set()
    gears = sorted(bundle.manifest.gears, key=lambda gear: -gear.slots)
    for tree, gear in {gear.tree: gear.name for gear in gears}.items():  # the least of each tree
        results = [
            Decoding(engine, prompt, options_of(temperature), FixedTree(bundle, gear)).run()
            for engine in (reference, compiled)
        ]
        assert results[0].steps == results[1].steps
        if temperature == 0:  # sampled, so small a teacher may accept nothing
            assert (tree == "plain") is (results[0].steps == 39)
        texts |= {result.token_ids for result in results}
    assert len(texts) == 1


def options_of(temperature: float = 0.0) -> Options:
    return Options(max_new_tokens=40, sampling=Sampling(temperature=temperature, seed=1), ignore_eos=True)


class CausalMask(CpuEngine):
    """Takes the tree for a chain: rows see their elder siblings too."""

    def verify(self, states: Any, drafts: Any) -> Any:
        (draft,) = drafts
        chain = replace(draft.tree, mask=np.tri(draft.tree.rows, dtype=np.bool_))
        return super().verify(states, [draft._replace(tree=chain)])


class LosesARow(CpuEngine):
    """Overwrites one committed value after the sixth token, like a misrouted commit."""

    def verify(self, states: Any, drafts: Any) -> Any:
        if states[0].length > 6:
            states[0].kv.buffers[2][1, 3, :] = 4.0
        return super().verify(states, drafts)


# The greedy text of so small a teacher does not notice a wrong mask; a sampled one does.
@pytest.mark.parametrize(("fault", "temperature"), [(CausalMask, 0.8), (LosesARow, 0.0), (LosesARow, 0.8)])
def test_a_wrong_step_is_no_tie(bundle: Bundle, teacher: HfTeacher, fault: type[CpuEngine], temperature: float) -> None:
    report = check_texts(fault(bundle), HfEngine(bundle, teacher), {"one": PROMPT}, options_of(temperature))
    assert not report["ok"]
    found = [d for d in report["per_prompt"][0]["differences"] if not d["tie"]]
    assert found and all(d["id"].startswith("engine, ") and d["margin"] > d["tolerance"] for d in found)


def test_a_broken_invariant_is_named_as_it_happens(bundle: Bundle, tiny_teacher: Path) -> None:
    engine = HfEngine.open(bundle, tiny_teacher)
    state = engine.begin(128)
    engine.prefill(state, np.array(PROMPT))
    poke(state.kv, 3, 2, 9.0)
    _, plain = bundle.trees["plain"]
    with pytest.raises(InvariantError, match=r"committed: layer 1, value: slot 2"):
        single.verify(engine, state, np.array([17]), plain)


@pytest.mark.parametrize("kind", ["medusa", "eagle3"])
def test_every_step_of_the_eager_engine_is_held_to_its_invariants(
    tiny_bundles: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    """And says so in the trace; a wrong mask stops it, which a causal one of a tree that branches is."""
    bundle = Bundle.open(tiny_bundles[kind])
    engine, options = EagerEngine(bundle), Options(max_new_tokens=8, ignore_eos=True)
    name = "ragged" if kind == "medusa" else "planned"
    gear = next(one.name for one in bundle.manifest.gears if (one.tree, one.slots) == (name, 128))
    trace = Trace()
    Decoding(engine, PROMPT, options, FixedTree(bundle, gear), trace).run()
    trace.write(tmp_path / "t.jsonl")
    _, *steps = Trace.read(tmp_path / "t.jsonl").events
    assert steps and all(event.invariants == LOOKED_AT > 9 for event in steps)
    topology, tree = bundle.trees[name]
    bundle.trees[name] = topology, replace(tree, mask=np.tri(tree.rows, dtype=np.bool_))
    with pytest.raises(InvariantError, match="tree: mask-row at row"):
        Decoding(engine, PROMPT, options, FixedTree(bundle, gear)).run()


def test_a_tree_that_contradicts_itself_is_refused(bundle: Bundle, teacher: HfTeacher) -> None:
    engine = HfEngine(bundle, teacher)
    _, tree = bundle.trees["ragged"]
    state = engine.begin(128)
    engine.prefill(state, np.array(PROMPT))
    chain = replace(tree, mask=np.tri(tree.rows, dtype=np.bool_))
    with pytest.raises(InvariantError, match="tree: mask-row at row 2"):
        single.verify(engine, state, np.zeros(tree.rows, np.int64), chain)


def test_a_tie_is_no_difference(bundle: Bundle, teacher: HfTeacher) -> None:
    """Two tokens whose logits differ by less than the noise of the engine that takes the other one."""

    class Noisy(CpuEngine):
        def verify(self, states: Any, drafts: Any) -> Any:
            (output,) = super().verify(states, drafts)
            shape, random = output.logits_RV.shape, np.random.default_rng(drafts[0].tree.rows)
            logits_RV = output.logits_RV + random.normal(0, 2.0, shape).astype(np.float32)
            return [output._replace(logits_RV=logits_RV, choice_R=logits_RV.argmax(-1))]

    modes = {"plain": FixedTree(bundle), "tree": FixedTree(bundle, widest_gear(bundle))}
    reference = HfEngine(bundle, teacher)
    _, found = compare_texts(Noisy(bundle), reference, PROMPT, options_of(), modes)
    assert found and all(d.tie == (d.margin <= d.tolerance) and d.tolerance > 1 for d in found)
    assert any(d.tie for d in found)


@pytest.fixture(scope="module")
def pangu(tiny_teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """openPangu's layout: biases on q, k, v and o, and modelling code, which is not run."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("pangu") / "model"
    shutil.copytree(tiny_teacher, folder)
    fields = json.loads((folder / "config.json").read_text())
    fields |= {"architectures": ["PanguEmbeddedForCausalLM"], "model_type": "PanguEmbedded", "bias": True}
    fields["auto_map"] = {
        "AutoConfig": "configuration_openpangu_dense.PanguEmbeddedConfig",
        "AutoModelForCausalLM": "modeling_openpangu_dense.PanguEmbeddedForCausalLM",
    }
    (folder / "config.json").write_text(json.dumps(fields))
    for name in ("configuration", "modeling"):
        (folder / f"{name}_openpangu_dense.py").write_text("raise AssertionError('never run')")
    tensors = load_file(folder / "model.safetensors")
    for name, weight in list(tensors.items()):
        if "self_attn" in name:
            tensors[name.replace("weight", "bias")] = torch.linspace(-0.5, 0.5, weight.shape[0])
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_openpangu_runs_as_a_llama_with_biases(pangu: Path, teacher: HfTeacher) -> None:
    as_llama = HfTeacher.open(pangu)
    assert type(as_llama.model).__name__ == "LlamaForCausalLM"
    tokens = np.arange(TREE.rows)
    steps = [t.step(prefilled(t, PROMPT), tokens, TREE.depths, TREE.mask).logits_RV for t in (as_llama, teacher)]
    assert (steps[0] - steps[1]).abs().max() > 0.1  # the biases are read


def test_what_cannot_be_used_is_refused(
    bundle: Bundle,
    tiny_bundle: Path,
    pangu: Path,
    tiny_teacher: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(CheckpointError, match=r"not the teacher of .*; give the folder that the bundle was built from"):
        HfEngine.open(bundle, pangu)
    with pytest.raises(CheckpointError, match=r"transformers .* cannot load it: "):
        HfTeacher.open(tmp_path)
    assert main(["check", str(tiny_bundle), "--teacher", str(tmp_path)]) == 2
    assert "draftwood: error:" in capsys.readouterr().err
