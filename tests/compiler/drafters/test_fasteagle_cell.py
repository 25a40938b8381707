"""FastEagle's cell against its equations: trees whose candidates follow the path, in float64, a node at a time."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draftwood.compiler.drafters.common.budget_tree import BudgetTree
from draftwood.compiler.drafters.common.fixed_tree import FixedTree
from draftwood.compiler.drafters.common.steps import ExtendStep
from draftwood.compiler.drafters.common.tree_step import TreeStep
from draftwood.compiler.drafters.fasteagle.checkpoint import open_fasteagle
from draftwood.compiler.drafters.fasteagle.model import CellModel, model_of
from draftwood.compiler.drafters.fasteagle.network import CellCascade
from draftwood.compiler.teachers.checkpoint import Checkpoint
from draftwood.compiler.teachers.decoder import Decoder
from draftwood.compiler.teachers.linear import QuantisedLinear, rows_of
from draftwood.errors import CheckpointError, TreeError
from draftwood.trees import Topology

LEVELS, CELL, SHORTLIST = 3, 24, 12
# fp32 against float64 through three blocks and two cells.
CLOSE = 1e-4
RAGGED = Topology.from_paths([(0,), (1,), (3,), (0, 0), (0, 2), (1, 1), (0, 0, 0), (0, 0, 1), (1, 1, 0), (1, 1, 2)])
TREES = {"ragged": RAGGED, "chain": Topology.chain(3), "one": Topology.chain(1)}
FIELDS = {
    "architectures": ["FastEagleDrafter"],
    "model_type": "fasteagle",
    "num_hidden_layers": LEVELS,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e3,
    "vocab_size": 101,
    "target_hidden_size": 64,
    "aux_layer_ids": [2, 4, 5],
    "cell_size": CELL,
    "cell_shortlist": SHORTLIST,
}


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


class Model:
    """A drafter with a cell, and what its nodes rank by the equations."""

    def __init__(self, make: Any, folder: Path, teacher: Checkpoint, load: Callable, draft: int) -> None:
        tensors = make.fasteagle_tensors(LEVELS, draft, CELL)
        make.save(folder, {**FIELDS, "draft_vocab_size": draft}, tensors)
        self.drafter = load(CellCascade, open_fasteagle(folder, teacher))
        self.ids = np.arange(draft) + (tensors["d2t"].numpy() if draft < 101 else 0)
        self.head = teacher.weight("lm_head.weight")[self.ids].double().numpy()
        self.oracle = make.oracle(tensors, embed=teacher.weight("embed.weight").double().numpy())

    def levels(self, features: np.ndarray, tokens: list[int]) -> list[np.ndarray]:
        """The root's hidden state of each level, behind the last norm."""
        oracle, get, found = self.oracle, self.oracle.get, []
        hidden = [
            get("proj.weight") @ np.concatenate([oracle.fused(states), oracle.embedded(token)])
            for states, token in zip(features, tokens, strict=True)
        ]
        for at in (f"layers.{i}" for i in range(LEVELS)):
            inputs = [oracle.norm(h, get(f"{at}.input_layernorm.weight")) for h in hidden]
            middle = [h + oracle.attention(inputs[: j + 1], at) for j, h in enumerate(hidden)]
            weight = get(f"{at}.post_attention_layernorm.weight")
            hidden = [h + oracle.feed_forward(oracle.norm(h, weight), at) for h in middle]
            found.append(oracle.norm(hidden[-1], get("norm.weight")))
        return found

    def ranked(self, levels: list[np.ndarray], path: list[int], noise: np.ndarray) -> list[tuple[int, float]]:
        """A node's candidates as (the teacher's id, log-probability), best first, ``path`` its drafted tokens."""
        get, depth, state, gain = self.oracle.get, len(path), np.zeros(CELL), np.zeros(64)
        for level, token in enumerate(path, 1):
            read = get("cell.state.weight") @ state + get("cell.token.weight") @ self.oracle.embedded(token)
            read = read + get("cell.level.weight") @ levels[level] + get("cell.level.bias")
            gate, content, output = read.reshape(3, CELL)
            state = sigmoid(gate) * state + (1 - sigmoid(gate)) * np.tanh(content)
            gain = get("cell.out.weight") @ np.tanh(output)
        alone = self.head @ levels[depth] + noise[depth]
        allowed = np.argsort(-alone)[: SHORTLIST if depth else None]
        logits = (self.head @ (levels[depth] + gain) + noise[depth])[allowed]
        order = np.argsort(-logits)
        logp = logits - np.log(np.exp(logits).sum())
        return [(int(self.ids[allowed[i]]), float(logp[i])) for i in order]

    def tree(self, features: np.ndarray, tokens: list[int], topology: Topology, noise: np.ndarray) -> tuple[list, list]:
        """Tokens and cumulative scores of a tree's rows behind the root."""
        levels, paths, scores = self.levels(features, tokens), [[]], [0.0]
        for row in range(1, topology.rows):
            parent = topology.parents[row]
            token, gained = self.ranked(levels, paths[parent], noise)[topology.ranks[row]]
            paths.append([*paths[parent], token])
            scores.append(scores[parent] + gained)
        return [path[-1] for path in paths[1:]], scores[1:]


@pytest.fixture(scope="module", params=[40, 101], ids=["rows", "teacher"])
def model(
    request: pytest.FixtureRequest,
    make: Any,
    tmp_path_factory: pytest.TempPathFactory,
    teacher: Checkpoint,
    load: Callable,
) -> Model:
    return Model(make, tmp_path_factory.mktemp("cell"), teacher, load, request.param)


def noise_of(model: Model, depth: int) -> torch.Tensor:
    return torch.randn(depth, len(model.ids), generator=torch.Generator().manual_seed(8))


def given(model: Model, decoder: Decoder, warm: Callable, depth: int, form: str = "fused") -> list[torch.Tensor]:
    inputs = warm(ExtendStep(model.drafter, decoder, form), 2 * LEVELS)
    return [*inputs[:4], noise_of(model, depth), *inputs[4:]]


@pytest.mark.parametrize("form", ["fused", "cpu"])
@pytest.mark.parametrize("name", TREES)
def test_trees(model: Model, decoder: Decoder, warm: Callable, text: tuple, name: str, form: str) -> None:
    tree = TREES[name]
    step = TreeStep(model.drafter, decoder, FixedTree(tree), form)
    tokens, scores, *_ = step(*given(model, decoder, warm, tree.depth, form))
    wanted = model.tree(*text, tree, noise_of(model, tree.depth).double().numpy())
    assert tokens.tolist() == wanted[0]
    np.testing.assert_allclose(scores, wanted[1], rtol=0, atol=CLOSE)


def test_siblings_children_differ(model: Model, decoder: Decoder, warm: Callable) -> None:
    tree = Topology.from_paths([(0,), (1,), *((a, b) for a in range(2) for b in range(4))])
    tokens, *_ = TreeStep(model.drafter, decoder, FixedTree(tree))(*given(model, decoder, warm, 2))
    assert tokens[2:6].tolist() != tokens[6:10].tolist()


def test_budget_trees_hold_the_best_nodes(model: Model, decoder: Decoder, warm: Callable, text: tuple) -> None:
    step = TreeStep(model.drafter, decoder, BudgetTree(5, 3, 3))
    tokens, parents, _, _, _, scores, *_ = step(*given(model, decoder, warm, 3))
    levels, noise, paths = model.levels(*text), noise_of(model, 3).double().numpy(), [[]]
    for row in range(1, 6):
        token, parent = int(tokens[row - 1]), int(parents[row])
        logp = dict(model.ranked(levels, paths[parent], noise))[token]
        paths.append([*paths[parent], token])
        before = float(scores[parent - 1]) if parent else 0.0
        assert abs(float(scores[row - 1]) - before - logp) < CLOSE


@pytest.mark.filterwarnings("ignore")
def test_onnx_and_one_write_a_cache(model: Model, make: Any, decoder: Decoder, warm: Callable) -> None:
    step = TreeStep(model.drafter, decoder, FixedTree(RAGGED))
    inputs = given(model, decoder, warm, RAGGED.depth)
    program, outputs = make.run_onnx(step, inputs)
    for ours, theirs in zip(outputs, step(*inputs), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)  # onnxruntime sums in another order
    assert make.written_once(program, 2 * LEVELS)


@pytest.mark.parametrize("part", ["state", "token", "level", "out"])
def test_harm_shows(model: Model, decoder: Decoder, warm: Callable, part: str) -> None:
    step, inputs = TreeStep(model.drafter, decoder, FixedTree(RAGGED)), given(model, decoder, warm, RAGGED.depth)
    scores = step(*inputs)[1]
    weight = getattr(model.drafter.cell, part).weight
    kept = weight.clone()
    weight.copy_(kept.roll(1, 0))
    worse = step(*inputs)[1]
    weight.copy_(kept)
    assert (scores - worse).abs().max() > 100 * CLOSE


def test_trees_that_it_cannot_draft(model: Model, decoder: Decoder) -> None:
    found = model_of(model.drafter.config)
    assert isinstance(found, CellModel) and found.follows_nodes
    for tree, message in (
        (Topology.chain(4), "4 levels deep, but the drafter has 3 levels"),
        (Topology.from_paths([(SHORTLIST,)]), "rank 12 is past the drafter's shortlist of 12"),
    ):
        with pytest.raises(TreeError, match=message):
            found.check_tree("t", tree, decoder.config)


def test_a_shortlist_reads_rows_of_a_quantised_matrix() -> None:
    head, ids = QuantisedLinear(4, 9, bias=False), torch.tensor([7, 0, 3])
    head.weight.copy_(torch.arange(-18, 18).view(4, 9))
    head.weight_scale.copy_(torch.arange(1, 10) / 8)
    wanted = (head.weight.float() * head.weight_scale).T[ids]
    assert torch.equal(rows_of(head, ids, torch.float32), wanted)
    plain = torch.nn.Linear(4, 9, bias=False)
    assert torch.equal(rows_of(plain, ids, torch.float32), plain.weight[ids])


REFUSED = [
    ({"cell_size": None}, "cell_shortlist is 12; expected no such field without cell_size"),
    ({"cell_size": 0}, "cell_size is 0; expected 1 or more"),
    ({"cell_shortlist": None}, "cell_shortlist is None; expected a whole number"),
    ({"cell_shortlist": 41}, "cell_shortlist is 41; expected 1 to 40"),
    ({"cell_size": 25}, r"cell.state.weight has shape \[72, 24\]; expected \[75, 25\]"),
    ({"cell_size": None, "cell_shortlist": None}, "does not explain: cell.level.bias"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED)
def test_refused(make: Any, teacher: Checkpoint, tmp_path: Path, fields: dict, message: str) -> None:
    make.save(tmp_path, {**FIELDS, "draft_vocab_size": 40, **fields}, make.fasteagle_tensors(LEVELS, 40, CELL))
    with pytest.raises(CheckpointError, match=message) as caught:
        open_fasteagle(tmp_path, teacher)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)
