"""DSpark against its equations, in its writers' layouts: trees whose candidates follow the path, in float64."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draftwood.compiler.drafters.common.steps import ExtendStep, TreeStep
from draftwood.compiler.drafters.common.trees import RankTree
from draftwood.compiler.drafters.dspark.model import DSparkModel
from draftwood.compiler.drafters.dspark.network import DSpark
from draftwood.compiler.drafters.kind import DSPARK
from draftwood.compiler.drafters.registry import kind_of
from draftwood.compiler.teachers.checkpoint import Checkpoint
from draftwood.compiler.teachers.decoder import Decoder
from draftwood.errors import CheckpointError, TreeError
from draftwood.trees import Topology

MASK, ROWS, LAYERS, RANK = 99, 4, 2, 12
# fp32 against float64 through two blocks and three steps of a head.
CLOSE = 1e-4
RAGGED = Topology.from_paths([(0,), (1,), (3,), (0, 0), (0, 2), (1, 1), (0, 0, 0), (0, 0, 1), (1, 1, 0), (1, 1, 2)])


def base(make: Any, **own: object) -> dict:
    qwen3 = {"model_type": "qwen3", "num_hidden_layers": LAYERS, "layer_types": ["full_attention"] * LAYERS}
    return make.sizes | qwen3 | {"block_size": ROWS, "num_target_layers": 8} | own


def deepspec(make: Any, **own: object) -> dict:
    heads = {"markov_rank": RANK, "enable_confidence_head": True, "confidence_head_with_markov": True}
    stated = {"architectures": ["Qwen3DSparkModel"], "mask_token_id": MASK, "target_layer_ids": [1, 3, 5]}
    return base(make, **stated, **heads, markov_head_type="vanilla", num_anchors=512) | own


def speculators(make: Any, **own: object) -> dict:
    block = {"model_type": "qwen3", "num_hidden_layers": LAYERS}
    stated = {"speculators_model_type": "dspark", "architectures": ["DSparkSpeculator"], "mask_token_id": MASK}
    states = {"aux_hidden_state_layer_ids": [2, 4, 6], "draft_vocab_size": 40, "sample_from_anchor": True}
    heads = {"markov_rank": RANK, "markov_head_type": "vanilla", "enable_confidence_head": True}
    return stated | states | heads | {"transformer_layer_config": make.sizes | block, "block_size": ROWS} | own


def specforge(make: Any, **own: object) -> dict:
    nested = {"mask_token_id": MASK, "target_layer_ids": [1, 3, 5], "shift_label": True, "projector_type": "dspark"}
    nested |= {"markov_rank": RANK, "enable_confidence_head": False} | own
    return base(make, architectures=["DSparkDraftModel"], dflash_config=nested, model_type="dspark")


def modelopt(make: Any) -> dict:
    nested = {"mask_token_id": MASK, "target_layer_ids": [1, 3, 5], "shift_label": True, "projector_type": "dspark"}
    nested |= {"markov_rank": RANK, "use_confidence_head": True}
    return base(make, architectures=["DFlashDraftModel"], dflash_config=nested)


# config.json, draft vocabulary (None if the teacher's matrices serve), kind of the head, what the confidence reads,
# whether the root's row drafts, and whether the heads' keys have nothing before them.
WRITERS: dict[str, tuple] = {
    "DeepSpec": (deepspec, 101, "vanilla", "markov", True, False),
    "DeepSpec-gated": (
        lambda make: deepspec(make, markov_head_type="gated", confidence_head_with_markov=False),
        *(101, "gated", "hidden", True, False),
    ),
    "DeepSpec-rnn": (lambda make: deepspec(make, markov_head_type="rnn"), 101, "rnn", "markov", True, False),
    "speculators": (speculators, 40, "vanilla", "markov", True, False),
    "speculators-masks": (
        lambda make: speculators(make, sample_from_anchor=False),
        *(40, "vanilla", "markov", False, False),
    ),
    "SpecForge": (specforge, None, "vanilla", "none", True, False),
    "SpecForge-confidence": (
        lambda make: specforge(make, enable_confidence_head=True),
        *(None, "vanilla", "hidden", True, False),
    ),
    "ModelOpt": (modelopt, None, "vanilla", "markov", True, True),
}


def tensors_of(make: Any, draft: int | None, head: str, confidence: str, bare: bool = False) -> dict:
    return make.dflash_tensors(LAYERS, 3, draft) | make.sequential_head(RANK, head, confidence, draft, bare)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


class Reference:
    """The equations in float64, a node at a time."""

    def __init__(self, oracle: Any, tensors: dict, output: np.ndarray, writer: tuple) -> None:
        _, _, self.head, self.confidence, self.from_root, bare = writer
        self.oracle, self.output = oracle, output
        self.at = ("", "confidence_proj") if bare else ("markov_head.", "confidence_head.proj")
        self.ids = tensors.get("d2t", torch.zeros(len(output), dtype=torch.int64)).numpy() + np.arange(len(output))

    def heads(self, path: list[int], levels: list[np.ndarray]) -> tuple[np.ndarray, float | None]:
        """The bias of the path's tokens, root first, on their levels' logits, and the logarithm of the confidence."""
        state, token, latent, get = np.zeros(RANK), np.zeros(RANK), np.zeros(RANK), self.get
        for level, last in zip(levels, path, strict=False):
            latent = token = get("markov_w1.weight")[last]
            if self.head == "gated":
                gate = get("gate_proj.weight") @ np.concatenate([level, token]) + get("gate_proj.bias")
                latent = sigmoid(gate) * token
            if self.head == "rnn":
                joint = get("joint_proj.weight") @ np.concatenate([state, token, level]) + get("joint_proj.bias")
                gate, content, output = joint.reshape(3, RANK)
                state = sigmoid(gate) * state + (1 - sigmoid(gate)) * np.tanh(content)
                latent = np.tanh(output)
        level, confidence = levels[len(path) - 1], None
        if self.confidence != "none":
            read = np.concatenate([level, token]) if self.confidence == "markov" else level
            weight, bias = (self.oracle.get(f"{self.at[1]}.{name}") for name in ("weight", "bias"))
            confidence = float(np.log(sigmoid(weight @ read + bias))[0])
        return get("markov_w2.weight") @ latent, confidence

    def get(self, name: str) -> np.ndarray:
        return self.oracle.get(self.at[0] + name)

    def tree(self, features: np.ndarray, root: int, topology: Topology, noise: np.ndarray) -> tuple[list, list]:
        """Tokens and cumulative scores of a tree's rows after the root."""
        rows = self.oracle.denoised(features, [root] + [MASK] * (ROWS - 1), LAYERS)
        levels, paths, scores = rows[0 if self.from_root else 1 :], [[root]], [0.0]
        for row in range(1, topology.rows):
            parent = topology.parents[row]
            bias, confidence = self.heads(paths[parent], levels)
            depth = len(paths[parent]) - 1
            logits = self.output @ levels[depth] + noise[depth] + bias
            order = np.argsort(-logits)
            logp = logits - np.log(np.exp(logits).sum())
            chosen = order[topology.ranks[row]]
            gained = logp[chosen] - (0 if confidence is None else logp[order[0]] - confidence)
            paths.append([*paths[parent], int(self.ids[chosen])])
            scores.append(scores[parent] + gained)
        return [path[-1] for path in paths[1:]], scores[1:]


@pytest.fixture(scope="module", params=WRITERS)
def written(
    request: pytest.FixtureRequest,
    make: Any,
    tmp_path_factory: pytest.TempPathFactory,
    teacher: Checkpoint,
    load: Callable,
) -> tuple[DSpark, Reference]:
    writer = WRITERS[request.param]
    config, draft, head, confidence, from_root, bare = writer
    folder, tensors = tmp_path_factory.mktemp("dspark"), tensors_of(make, draft, head, confidence, bare)
    make.save(folder, config(make), tensors)
    assert kind_of(folder) is DSPARK
    opened = DSparkModel.open(folder, teacher).checkpoint
    assert opened.config.aux_layers == (2, 4, 6) and opened.config.from_root == from_root
    embed = teacher.weight("embed.weight").double().numpy()
    output = tensors.get("lm_head.weight", teacher.weight("lm_head.weight")).double().numpy()
    return load(DSpark, opened), Reference(make.oracle(tensors, embed=embed), tensors, output, writer)


def given(drafter: DSpark, decoder: Decoder, warm: Callable, depth: int, form: str = "fused") -> list[torch.Tensor]:
    inputs = warm(ExtendStep(drafter, decoder, form), 2 * LAYERS)
    return [*inputs[:4], noise_of(drafter, depth), *inputs[4:]]


def noise_of(drafter: DSpark, depth: int) -> torch.Tensor:
    return torch.randn(depth, drafter.config.draft_vocabulary, generator=torch.Generator().manual_seed(8))


@pytest.mark.parametrize("form", ["fused", "cpu"])
def test_trees(written: tuple, decoder: Decoder, warm: Callable, text: tuple, form: str) -> None:
    drafter, reference = written
    tokens, scores, *_ = TreeStep(drafter, decoder, RankTree(RAGGED), form)(*given(drafter, decoder, warm, 3, form))
    wanted = reference.tree(text[0], text[1][-1], RAGGED, noise_of(drafter, 3).double().numpy())
    assert tokens.tolist() == wanted[0]
    np.testing.assert_allclose(scores, wanted[1], rtol=0, atol=CLOSE)


@pytest.fixture(scope="module")
def drafter(make: Any, tmp_path_factory: pytest.TempPathFactory, teacher: Checkpoint, load: Callable) -> DSpark:
    folder = tmp_path_factory.mktemp("dspark")
    make.save(folder, deepspec(make, markov_head_type="rnn"), tensors_of(make, 101, "rnn", "markov"))
    return load(DSpark, DSparkModel.open(folder, teacher).checkpoint)


@pytest.mark.filterwarnings("ignore")
def test_onnx_and_one_write_a_cache(drafter: DSpark, make: Any, decoder: Decoder, warm: Callable) -> None:
    step = TreeStep(drafter, decoder, RankTree(RAGGED))
    inputs = given(drafter, decoder, warm, RAGGED.depth)
    program, outputs = make.run_onnx(step, inputs)
    for ours, theirs in zip(outputs, step(*inputs), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)  # onnxruntime sums in another order
    assert make.written_once(program, 2 * LAYERS)


def test_the_confidence_is_that_of_the_first_candidate(drafter: DSpark, decoder: Decoder, warm: Callable) -> None:
    step, inputs = TreeStep(drafter, decoder, RankTree(Topology.chain(1))), given(drafter, decoder, warm, 1)
    before = float(step(*inputs)[1][0])
    drafter.confidence_proj.bias += 200.0
    sure = float(step(*inputs)[1][0])
    drafter.confidence_proj.bias -= 400.0
    never = float(step(*inputs)[1][0])
    drafter.confidence_proj.bias += 200.0
    assert never == pytest.approx(-60, abs=1e-3) and never < before < sure == 0.0


def test_trees_that_it_cannot_draft(drafter: DSpark, decoder: Decoder) -> None:
    with pytest.raises(TreeError, match="5 levels deep, but the drafter has 4 levels"):
        DSPARK.model.of_manifest(asdict(drafter.config)).check_tree("t", Topology.chain(5), decoder.config)


REFUSED = [
    (
        lambda make: deepspec(make, markov_head_type="lstm"),
        "markov_head_type is 'lstm'; expected one of vanilla, gated",
    ),
    (lambda make: deepspec(make, markov_rank=13), r"markov_w1.weight has shape \[101, 12\]; expected \[101, 13\]"),
    (lambda make: deepspec(make, enable_confidence_head=False), "enable_confidence_head is False; expected true, as"),
    (
        lambda make: deepspec(make, confidence_head_with_markov=False),
        r"proj.weight has shape \[1, 76\]; expected \[1, 64",
    ),
    (lambda make: deepspec(make, causal=True), "causal is True; expected False"),
    (lambda make: deepspec(make, mask_token_id=None), "mask_token_id is None; expected the id of the mask token"),
    (
        lambda make: deepspec(make, architectures=["DSparkSpeculator"]),
        "sample_from_anchor is None; expected true where",
    ),
    (
        lambda make: deepspec(
            make, architectures=["DSparkSpeculator"], sample_from_anchor=False, markov_head_type="rnn"
        ),
        "markov_head_type is 'rnn'; expected vanilla or gated where the root's row makes no draft",
    ),
    (
        lambda make: deepspec(make, architectures=["DSparkSpeculator"], sample_from_anchor=True, markov_rank=0),
        "markov_rank is 0; expected 1 or more",
    ),
    *(
        (
            lambda make, name=name, inside=inside: deepspec(make, dflash_config={name: inside}),
            f"{name} is .*; expected the same as in dflash_config, {inside!r}, or only one of the two",
        )
        for name, inside in (("markov_rank", 13), ("markov_head_type", "rnn"), ("confidence_head_with_markov", False))
    ),
]


@pytest.mark.parametrize(("config", "message"), REFUSED, ids=[message[:40] for _, message in REFUSED])
def test_refused(make: Any, teacher: Checkpoint, tmp_path: Path, config: Callable, message: str) -> None:
    make.save(tmp_path, config(make), tensors_of(make, 101, "vanilla", "markov"))
    with pytest.raises(CheckpointError, match=message) as caught:
        DSPARK.model.open(tmp_path, teacher)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)
