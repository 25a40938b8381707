"""EAGLE-3 against the paper's equations, in every published layout, and over fixed trees."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draftwood.compiler.drafters.common.layers import Waiting
from draftwood.compiler.drafters.common.steps import ExtendStep, NewRows, TreeStep
from draftwood.compiler.drafters.common.steps import tree_step as any_length_step
from draftwood.compiler.drafters.common.trees import RankTree
from draftwood.compiler.drafters.eagle3.model import Eagle3Model
from draftwood.compiler.drafters.eagle3.network import Eagle3
from draftwood.compiler.steps.tracing import trace
from draftwood.compiler.teachers.checkpoint import Checkpoint
from draftwood.compiler.teachers.decoder import Decoder, TeacherEnds
from draftwood.trees import Topology

# fp32 against float64 through a block and its feedback four levels deep.
CLOSE = 1e-4
# Wrong inputs must stand out from rounding by far.
FAR = 100 * CLOSE
RAGGED = Topology.from_paths([(0,), (1,), (3,), (0, 0), (0, 2), (1, 1), (0, 0, 0), (0, 0, 1), (1, 1, 0), (1, 1, 0, 2)])
TREES = {"ragged": RAGGED, "chain": Topology.chain(4), "backbone": Topology.backbone(3, 3), "one": Topology.chain(1)}


class Variant:
    """A drafter on disk, its oracle, and its network."""

    def __init__(self, folder: Path, make: Any, teacher: Checkpoint, load: Callable, layout: str, **options) -> None:
        hidden, draft = options.get("hidden", 64), options.get("draft", 40)
        at = "layers.0" if layout in ("speculators", "ModelOpt", "Automodel", "DeepSpec") else "midlayer"
        shape = {name: options[name] for name in ("states", "layers", "qk") if name in options}
        tensors = make.eagle3_tensors(at, hidden=hidden, draft=draft, **shape)
        random = torch.Generator().manual_seed(17)
        block = {"attention_bias": "bias" in options, "num_hidden_layers": options.get("layers", 1)}
        config = make.eagle3_config(layout, draft, hidden_size=hidden, **block | options.get("block", {}))
        config |= options.get("fields", {})
        for name, shape in options.get("extra", {}).items():
            tensors[name] = 1 + torch.randn(shape, generator=random) * 0.15
        if "bias" in options:
            for side, width in (("q", 64), ("k", 32), ("v", 32), ("o", hidden)):
                tensors[f"{at}.self_attn.{side}_proj.bias"] = torch.randn(width, generator=random) * 0.15
        for name in options.get("without", ()):
            del tensors[name]
        body = options.get("before", "")
        keys = {key: key if key in ("d2t", "t2d", "lm_head.weight") else body + key for key in tensors}
        make.save(folder, config, {keys[k]: t for k, t in tensors.items()}, options.get("file", "model.safetensors"))
        self.checkpoint = Eagle3Model.open(folder, teacher).checkpoint
        self.drafter = load(Eagle3, self.checkpoint)
        embed, head = (teacher.weight(name).double().numpy() for name in ("embed.weight", "lm_head.weight"))
        ids = np.arange(draft) + (tensors["d2t"].numpy() if "d2t" in tensors else 0)
        self.oracle = make.oracle(tensors, at, embed=embed, head=head[ids], **options.get("oracle", {}))
        self.oracle.layers = options.get("layers", 1)
        if window := options.get("window"):
            config = replace(self.checkpoint.config, window=window)  # shorter than a folder may say
            self.checkpoint = replace(self.checkpoint, config=config)
            self.drafter, self.oracle.window = load(Eagle3, self.checkpoint), window


SPECULATORS = {
    "fields": {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True},
    "extra": {"input_norm.weight": (192,)},
    "oracle": {"feature_norm": "whole", "norm_before_residual": True, "norm_output": True},
}
PER_STATE = {
    "fields": {"fc_norm": True, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}},
    "extra": {f"fc_norm.{i}.weight": (64,) for i in range(3)},
    "oracle": {"feature_norm": "each"},
}
NEWER = {  # EAGLE-3.1 as Automodel writes it
    "fields": {"fc_norm": True, "norm_output": True},
    "extra": {f"fc_norm.{i}.weight": (64,) for i in range(3)},
    "oracle": {"feature_norm": "each", "norm_output": True},
    "before": "model.",
}
FIVE = {  # DeepSpec stores the teacher's matrices and maps nothing
    "states": 5, "qk": True, "draft": 101, "without": ("d2t", "t2d"), "extra": {"embed_tokens.weight": (101, 64)}
}  # fmt: skip
QWEN3 = {"qk": True, "block": {"model_type": "qwen3"}}
VARIANTS = {
    "SafeAILab": ("SafeAILab", {}),
    "SafeAILab-bin": ("SafeAILab", {"file": "pytorch_model.bin"}),
    "SafeAILab-bias": ("SafeAILab", {"bias": True}),
    "SpecForge": ("SpecForge", {}),
    "SpecForge-fc-norm": ("SpecForge", PER_STATE),
    "speculators": ("speculators", {}),
    "speculators-3.1": ("speculators", SPECULATORS),
    "narrow": ("speculators", {"hidden": 48}),
    "whole-vocabulary": ("SafeAILab", {"draft": 101, "without": ("d2t", "t2d")}),
    "tied-rows": ("SafeAILab", {"without": ("lm_head.weight", "t2d")}),
    "ModelOpt": ("ModelOpt", {"without": ("t2d",), "layers": 2}),
    "AngelSlim": ("AngelSlim", {"extra": {"embed_tokens.weight": (101, 64)}}),
    "Automodel": ("Automodel", {"before": "model.", "bias": True}),
    "Automodel-3.1": ("Automodel", NEWER),
    "DeepSpec": ("DeepSpec", FIVE),
    "speculators-qwen3": ("speculators", QWEN3 | {"layers": 2}),
    "SpecForge-qwen3": ("SpecForge", QWEN3),
    "window": ("speculators", {"window": 4, "layers": 2}),
    "tied": ("SafeAILab", {"draft": 101, "without": ("lm_head.weight", "d2t", "t2d")}),
}


@pytest.fixture(scope="module", params=VARIANTS)
def variant(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    make: Any,
    teacher: Checkpoint,
    load: Callable,
) -> Variant:
    layout, options = VARIANTS[request.param]
    return Variant(tmp_path_factory.mktemp("drafter"), make, teacher, load, layout, **options)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, make: Any, teacher: Checkpoint, load: Callable) -> Variant:
    return Variant(tmp_path_factory.mktemp("drafter"), make, teacher, load, "SafeAILab")


def tree_step(variant: Variant, decoder: Decoder, tree: Topology, form: str = "fused") -> TreeStep:
    return TreeStep(variant.drafter, decoder, RankTree(tree), form)


def given(step: TreeStep, inputs: list[torch.Tensor], spread: float = 0.0) -> list[torch.Tensor]:
    """The arguments of a draft step: the inputs, with random noise of this size after the fourth."""
    noise = (
        torch.randn(step.tree.depth, step.drafter.config.draft_vocabulary, generator=torch.Generator().manual_seed(8))
        * spread
    )
    return [*inputs[:4], noise, *inputs[4:]]


def inputs_of(variant: Variant, decoder: Decoder, warm: Callable, form: str = "fused") -> list[torch.Tensor]:
    return warm(ExtendStep(variant.drafter, decoder, form), 2 * variant.checkpoint.config.block.layers)


@pytest.mark.parametrize("form", ["fused", "eager", "cpu"])
def test_hidden_states_and_logits(variant: Variant, decoder: Decoder, warm: Callable, text: tuple, form: str) -> None:
    tokens, rows, committed, accepted, *caches = inputs_of(variant, decoder, warm, form)
    drafter, oracle = variant.drafter, variant.oracle
    teacher = TeacherEnds(decoder, embeds=True, scores=True)
    written = drafter.extend(Waiting(tokens, rows, committed, accepted), caches, teacher, form)
    hidden, branch, drafted = written.root, None, [17, 3, 88, 40]
    for depth in range(len(drafted) + 1):
        if depth:
            visible = torch.zeros(1, depth, dtype=torch.bool)
            token = torch.tensor(drafted[depth - 1 : depth])
            hidden, branch = drafter.level(token, hidden.fed_back_RH, depth, branch, visible, written, teacher)
        wanted = oracle.run(*text, drafted[:depth])
        np.testing.assert_allclose(hidden.fed_back_RH[0], oracle.fed_back(wanted), rtol=0, atol=CLOSE)
        logits = drafter.logits(hidden.normed_RH, teacher)[0]
        np.testing.assert_allclose(logits, oracle.logits(wanted), rtol=0, atol=CLOSE)


def slow_tree(oracle: Any, text: tuple, tree: Topology) -> tuple[list[int], list[float]]:
    """Tokens and cumulative scores of rows 1 to M, each node ranked at its own parent."""
    tokens: list[list[int]] = [[]]
    scores = [0.0]
    for row in range(1, tree.rows):
        parent, rank = tree.parents[row], tree.ranks[row]
        token, logp = oracle.ranked(*text, tokens[parent], tree.width)[rank]
        tokens.append([*tokens[parent], token])
        scores.append(scores[parent] + logp)
    return [path[-1] for path in tokens[1:]], scores[1:]


@pytest.mark.parametrize("tree", TREES)
def test_fixed_tree(plain: Variant, decoder: Decoder, warm: Callable, text: tuple, tree: str) -> None:
    step = tree_step(plain, decoder, TREES[tree])
    tokens, scores, *_ = step(*given(step, inputs_of(plain, decoder, warm)))
    wanted = slow_tree(plain.oracle, text, TREES[tree])
    assert tokens.tolist() == wanted[0] and tokens.dtype == torch.int64
    np.testing.assert_allclose(scores, wanted[1], rtol=0, atol=CLOSE)


def test_noise_is_added_to_the_logits_of_its_level(
    plain: Variant, decoder: Decoder, warm: Callable, text: tuple
) -> None:
    """Against the oracle's log-probabilities of each node's parent, the noise added there and summed to 1 again."""
    step = tree_step(plain, decoder, RAGGED)
    inputs = given(step, inputs_of(plain, decoder, warm), 2.0)
    drafted, scores, *_ = step(*inputs)
    ids, noise, tokens = plain.drafter.teacher_ids.tolist(), inputs[4].double().numpy(), [[]]
    for row in range(1, RAGGED.rows):
        parent, level = RAGGED.parents[row], RAGGED.depths[row] - 1
        logp = dict(plain.oracle.ranked(*text, tokens[parent], 40))
        heights = np.array([logp[token] for token in ids]) + noise[level]
        best = np.argsort(-heights)[RAGGED.ranks[row]]
        assert drafted[row - 1] == ids[best]
        above = float(scores[parent - 1]) if parent else 0.0
        wanted = above + heights[best] - np.logaddexp.reduce(heights)
        assert abs(float(scores[row - 1]) - wanted) < 2 * CLOSE
        tokens.append([*tokens[parent], int(drafted[row - 1])])


def test_fixed_tree_in_every_layout(variant: Variant, decoder: Decoder, warm: Callable, text: tuple) -> None:
    step = tree_step(variant, decoder, RAGGED)
    tokens, scores, *_ = step(*given(step, inputs_of(variant, decoder, warm)))
    wanted = slow_tree(variant.oracle, text, RAGGED)
    assert tokens.tolist() == wanted[0]
    np.testing.assert_allclose(scores, wanted[1], rtol=0, atol=CLOSE)


def test_the_cache_holds_accepted_text_alone(plain: Variant, decoder: Decoder, warm: Callable) -> None:
    # Slots 0 to 10 are text; the last slot takes padding; a tree leaves no trace anywhere.
    inputs = inputs_of(plain, decoder, warm)
    step = tree_step(plain, decoder, RAGGED)
    *_, key, value = step(*given(step, inputs))
    for before, after in ((inputs[-2], key), (inputs[-1], value)):
        changed = (before != after).view(2, 32, 16).any(-1)
        assert changed[:, 8:11].all() and not changed[:, :8].any() and not changed[:, 11:31].any()
    waiting = Waiting(inputs[0][:3], inputs[1][:3], inputs[2], inputs[3])
    again = plain.drafter.extend(waiting, inputs[4:], TeacherEnds(decoder, embeds=True, scores=True))
    for ours, theirs in zip((key, value), again.caches, strict=True):
        torch.testing.assert_close(
            ours.view(2, 32, 16)[:, :11], theirs.view(2, 32, 16)[:, :11], rtol=0, atol=1e-5
        )  # other row counts


def test_padding_and_stale_slots_do_not_matter(plain: Variant, decoder: Decoder, warm: Callable) -> None:
    step, inputs = tree_step(plain, decoder, RAGGED), inputs_of(plain, decoder, warm)
    tokens, scores, *_ = step(*given(step, inputs))
    other = [t.clone() for t in inputs]
    other[0][3], other[1][3] = 77, 6
    for cache in other[4:]:
        cache.view(2, 32, 16)[:, 11:] = -30.0
    others = step(*given(step, other))
    assert torch.equal(tokens, others[0])
    torch.testing.assert_close(scores, others[1], rtol=0, atol=1e-6)  # masked scores add exact zeros


def test_zero_inputs_index_nothing_outside(plain: Variant, decoder: Decoder) -> None:
    zeros = [torch.zeros(4, dtype=torch.int64), torch.zeros(4, 192)]
    ends = [torch.zeros(1, dtype=torch.int64)] * 2 + [torch.zeros(64, 16)] * 2
    step = tree_step(plain, decoder, RAGGED)
    assert step(*given(step, [*zeros, *ends]))[0].shape == (RAGGED.nodes,)


def wrong_tokens(inputs: list, step: TreeStep) -> None:
    inputs[0] = inputs[0].roll(1)


def wrong_features(inputs: list, step: TreeStep) -> None:
    inputs[1] = inputs[1][[1, 2, 3, 0]]


def wrong_length(inputs: list, step: TreeStep) -> None:
    inputs[2] = inputs[2] + 1


def wrong_ids(inputs: list, step: TreeStep) -> None:
    step.drafter.teacher_ids = step.drafter.teacher_ids.roll(1)


def causal_mask(inputs: list, step: TreeStep) -> None:
    for level in step.tree.levels:
        level.masked_ES = None


def wrong_parents(inputs: list, step: TreeStep) -> None:
    for level in step.tree.levels:
        if level.source_E is not None:
            level.source_E = torch.zeros_like(level.source_E)


@pytest.mark.parametrize("harm", [wrong_tokens, wrong_features, wrong_length, wrong_ids, causal_mask, wrong_parents])
def test_harm_shows(
    tmp_path: Path, make: Any, teacher: Checkpoint, load: Callable, decoder: Decoder, warm: Callable, harm: Callable
) -> None:
    # A draft tree that is wrong only drafts worse, so nothing downstream would notice.
    harmed = Variant(tmp_path, make, teacher, load, "SafeAILab")
    step, inputs = tree_step(harmed, decoder, RAGGED), inputs_of(harmed, decoder, warm)
    tokens, scores, *_ = step(*given(step, inputs))
    harm(inputs, step)
    worse = step(*given(step, inputs))
    assert not torch.equal(tokens, worse[0]) or (scores - worse[1]).abs().max() > FAR


@pytest.mark.filterwarnings("ignore")
def test_onnx_and_one_write_a_cache(plain: Variant, make: Any, decoder: Decoder, warm: Callable) -> None:
    step = tree_step(plain, decoder, TREES["backbone"])
    inputs = given(step, inputs_of(plain, decoder, warm), 1.0)
    program, outputs = make.run_onnx(step, inputs)
    for ours, theirs in zip(outputs, step(*inputs), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)  # onnxruntime sums in another order
    assert make.written_once(program, 2)


@pytest.mark.filterwarnings("ignore")
def test_a_window_ties_the_graph_of_a_cpu_to_no_length(
    tmp_path: Path, make: Any, teacher: Checkpoint, load: Callable, decoder: Decoder
) -> None:
    windowed = Variant(tmp_path, make, teacher, load, "speculators", window=4)
    step = any_length_step(windowed.drafter, decoder, "draft", RankTree(Topology.chain(2)), NewRows(0, 0))
    program = trace(step).module()
    tokens, text, block = torch.tensor([5, 6, 7]), torch.tensor([3]), windowed.checkpoint.config.block
    features = torch.randn(3, windowed.checkpoint.config.features, generator=torch.Generator().manual_seed(3))
    caches = [torch.zeros(1, block.kv_heads, 48, block.head_dim) for _ in range(2 * block.layers)]
    inputs = (tokens, features, text, text, torch.zeros(2, 40))
    ours, theirs = (module(*inputs, *(cache.clone() for cache in caches)) for module in (program, step.module))
    assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])


def test_half_precision_runs(plain: Variant, decoder: Decoder, warm: Callable) -> None:
    inputs = inputs_of(plain, decoder, warm)
    drafter = Eagle3(plain.checkpoint.config, 32)
    drafter.load_state_dict(plain.drafter.state_dict())
    drafter.bfloat16()
    half = [t.bfloat16() if t.is_floating_point() else t for t in inputs]
    teacher = TeacherEnds(deepcopy(decoder).bfloat16(), embeds=True)
    written = drafter.extend(Waiting(*half[:4]), half[4:], teacher)
    root = drafter.root(written, teacher, torch.zeros(RAGGED.depth, 40, dtype=torch.bfloat16))
    tokens, scores = RankTree(RAGGED).grow(root)
    assert written.caches[0].dtype == written.root.fed_back_RH.dtype == torch.bfloat16
    assert tokens.shape == scores.shape and scores.dtype == torch.float32
    step = tree_step(plain, decoder, RAGGED)
    wanted = step(*given(step, inputs))[1]
    assert (scores[0] - wanted[0]).abs() < 0.2  # eight bits of mantissa through one block
