"""Budget trees against the published growth and rerank, and their buffers against the tree invariants."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draftwood.compiler.drafters.common import trees as budget_tree
from draftwood.compiler.drafters.common.steps import ExtendStep, TreeStep
from draftwood.compiler.drafters.common.trees import BudgetDraft, BudgetTree
from draftwood.compiler.drafters.eagle3.model import Eagle3Model
from draftwood.compiler.drafters.eagle3.network import Eagle3
from draftwood.compiler.teachers.checkpoint import Checkpoint
from draftwood.compiler.teachers.decoder import Decoder
from draftwood.errors import TreeError
from draftwood.trees import TreeBuffers, violations

# fp32 against float64, summed over four levels.
CLOSE = 2e-4
# Nodes M, depth D, candidates k; the last keeps all that is grown.
BUDGETS = [(1, 1, 1), (2, 1, 4), (3, 3, 1), (7, 3, 3), (11, 2, 5), (16, 4, 4), (2, 3, 2), (10, 3, 2)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, make) -> Path:
    tensors = make.eagle3_tensors()
    return make.save(tmp_path_factory.mktemp("drafter"), make.eagle3_config("SafeAILab"), tensors)


@pytest.fixture(scope="module")
def drafter(folder: Path, teacher: Checkpoint, load: Callable) -> Eagle3:
    return load(Eagle3, Eagle3Model.open(folder, teacher).checkpoint)


@pytest.fixture(scope="module")
def oracle(make: Any, teacher: Checkpoint) -> Any:
    return make.oracle(make.eagle3_tensors(), embed=teacher.weight("embed.weight").double().numpy())


@pytest.fixture(scope="module")
def inputs(drafter: Eagle3, decoder: Decoder, warm: Callable) -> list[torch.Tensor]:
    return warm(ExtendStep(drafter, decoder, "fused"), 2)


def draft(drafter: Eagle3, decoder: Decoder, inputs: list, budget: tuple) -> BudgetDraft:
    step = TreeStep(drafter, decoder, BudgetTree(*budget))
    return BudgetDraft(*step(*given(step, inputs))[:6])


def given(step: TreeStep, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """The arguments of a draft step: the inputs, with no noise after the fourth."""
    return [*inputs[:4], torch.zeros(step.tree.depth, step.drafter.config.draft_vocabulary), *inputs[4:]]


def published(rank: Callable[[list[int]], list[tuple]], nodes: int, depth: int, k: int) -> dict:
    """The procedure of SafeAILab/EAGLE's topK_genrate, in Python lists; ``rank`` gives a path's k best tokens.

    Indices of -1 stand in ``retrieve`` if rows are shorter than the longest, as published.
    """
    tokens, scores, parents = [], [], [0]
    frontier = [([], 0.0)]  # a node's path and score
    chosen = list(range(k))
    for i in range(depth):
        level = [([*path, t], score + logp) for path, score in frontier for t, logp in rank(path)]
        tokens += [path[-1] for path, _ in level]
        scores += [score for _, score in level]
        if i:
            chosen = sorted(range(len(level)), key=lambda j: -level[j][1])[:k]
        frontier = [level[j] for j in chosen]
        parents += [j + 1 + k * k * max(0, i - 1) + (k if i else 0) for j in chosen]
    kept = sorted(sorted(range(len(scores)), key=lambda j: -scores[j])[:nodes])
    above = [parents[j // k] for j in kept]
    rows = [0 if parent == 0 else int(np.searchsorted(kept, parent - 1)) + 1 for parent in above]
    mask = np.eye(nodes + 1, dtype=bool)
    mask[:, 0] = True
    for i, row in enumerate(rows):
        mask[i + 1] |= mask[row]
    leaves = [row for row in range(1, nodes + 1) if row not in rows]
    positions = mask.sum(1) - 1
    retrieve = np.full((len(leaves), positions.max() + 1), -1)
    for line, leaf in zip(retrieve, leaves, strict=True):
        line[: positions[leaf] + 1] = np.flatnonzero(mask[leaf])
    return {
        "tokens": [tokens[j] for j in kept], "scores": [scores[j] for j in kept], "parents": [0, *rows],
        "mask": mask, "positions": positions, "retrieve": retrieve,
    }  # fmt: skip


def buffers_of(out: BudgetDraft) -> TreeBuffers:
    parents, depths, mask, paths = (t.numpy() for t in out[1:5])
    # Siblings stand by rank, best first.
    ranks = np.array([0] + [int((parents[1:row] == parents[row]).sum()) for row in range(1, len(parents))])
    return TreeBuffers(parents, ranks, depths, mask, paths)


@pytest.mark.parametrize("budget", BUDGETS, ids=str)
def test_as_published(drafter: Eagle3, decoder: Decoder, inputs: list, oracle: Any, text: tuple, budget: tuple) -> None:
    nodes, depth, k = budget
    out = draft(drafter, decoder, inputs, budget)
    wanted = published(lambda path: oracle.ranked(*text, path, k), nodes, depth, k)
    assert out.tokens_M.tolist() == wanted["tokens"]
    np.testing.assert_allclose(out.scores_M, wanted["scores"], rtol=0, atol=CLOSE)
    assert out.parents_T.tolist() == wanted["parents"]
    np.testing.assert_array_equal(out.mask_TT, wanted["mask"])
    np.testing.assert_array_equal(out.depths_T, wanted["positions"])
    paths = {tuple(path[: d + 1]) for path, d in zip(out.paths_TL.tolist(), out.depths_T.tolist(), strict=True)}
    lines = {tuple(line[line >= 0].tolist()) for line in wanted["retrieve"]}
    assert lines == {path for path in paths if path[-1] not in out.parents_T.tolist()}
    assert out.paths_TL.shape == (nodes + 1, depth + 1)


@pytest.mark.parametrize("budget", BUDGETS, ids=str)
def test_invariants(drafter: Eagle3, decoder: Decoder, inputs: list, budget: tuple) -> None:
    out = draft(drafter, decoder, inputs, budget)
    assert violations(buffers_of(out)) == []
    siblings = list(zip(out.parents_T.tolist()[1:], out.tokens_M.tolist(), strict=True))
    assert len(set(siblings)) == len(siblings)
    assert [t.dtype for t in out] == [torch.int64] * 3 + [torch.bool, torch.int64, torch.float32]


@pytest.mark.parametrize("budget", [(11, 3, 2), (0, 1, 1), (1, 0, 4), (1, 1, 0)], ids=str)
def test_impossible_budgets_are_refused(budget: tuple) -> None:
    with pytest.raises(TreeError, match=r"budget of \d+ nodes, depth \d, \d candidates: expected 1 to"):
        BudgetTree(*budget)


def test_certain_tokens_keep_their_parents(
    folder: Path, teacher: Checkpoint, load: Callable, decoder: Decoder, inputs: list
) -> None:
    # Log-probabilities of exactly 0 all along a path: every node ties with its parent.
    drafter = load(Eagle3, Eagle3Model.open(folder, teacher).checkpoint)
    drafter.draft_head.weight *= 200
    for nodes in (4, 5, 9, 14):
        out = draft(drafter, decoder, inputs, (nodes, 4, 4))
        assert (out.scores_M == 0).sum() == 4 and violations(buffers_of(out)) == []
        chain = out.scores_M.eq(0).nonzero().flatten() + 1
        assert out.parents_T[chain].tolist() == [0, *chain[:-1].tolist()]


def grown(random: np.random.Generator, depth: int, k: int, losses: np.ndarray) -> tuple[list, list]:
    """Scores and parents of a random growth in which ties are the rule."""
    scores, parents = list(random.choice(losses, k)), [0] * k
    first, frontier = 0, list(range(k))
    for _ in range(depth - 1):
        first = len(scores)
        for node in frontier:
            scores += list(scores[node] + random.choice(losses, k))
            parents += [node + 1] * k
        level = random.permutation(np.arange(first, len(scores)))  # ties fall either way
        frontier = sorted(level, key=lambda j: -scores[j])[:k]
    return scores, parents


def broken(tree: BudgetTree, random: np.random.Generator, losses: np.ndarray) -> bool:
    """Whether a parent that the rerank names is not the node's own."""
    scores, parents = grown(random, tree.depth, tree.candidates, losses)
    names = torch.arange(len(scores))  # the tokens say which nodes were kept
    out = tree._rerank(names, torch.tensor(scores, dtype=torch.float32), torch.tensor(parents))
    kept = [0, *(out.tokens_M + 1).tolist()]
    assert violations(buffers_of(out)) == []  # indices are valid whatever the scores are
    return any(kept[out.parents_T[row]] != parents[kept[row] - 1] for row in range(1, len(kept)))


@pytest.mark.parametrize("losses", [[0.0], [0.0, -1.0], [0.0, -200.0], [-220.0]], ids=str)
def test_parents_stay_when_scores_tie(losses: list[float]) -> None:
    random = np.random.default_rng(1)
    assert not any(
        broken(BudgetTree(nodes, 4, 4), random, np.array(losses)) for nodes in range(4, 30) for _ in range(5)
    )


def test_without_the_cost_of_a_level_parents_get_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget_tree, "LEVEL_COST", 0.0)
    random = np.random.default_rng(1)
    assert any(
        broken(BudgetTree(nodes, 4, 4), random, np.array([0.0, -1.0])) for nodes in range(4, 30) for _ in range(5)
    )


@pytest.mark.filterwarnings("ignore")
def test_onnx_and_one_write_a_cache(make: Any, drafter: Eagle3, decoder: Decoder, inputs: list) -> None:
    step = TreeStep(drafter, decoder, BudgetTree(9, 3, 3))
    inputs = given(step, inputs)
    program, outputs = make.run_onnx(step, inputs)
    for ours, theirs in zip(outputs, step(*inputs), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)  # onnxruntime sums in another order
    assert make.written_once(program, 2)


def test_a_causal_mask_shows(monkeypatch: pytest.MonkeyPatch, drafter: Eagle3, decoder: Decoder, inputs: list) -> None:
    wanted = draft(drafter, decoder, inputs, (16, 4, 4))
    attend = type(drafter.block).attend_tree

    def causal(self, q, cache, unseen, branch, masked):
        return attend(self, q, cache, unseen, branch, torch.zeros_like(masked))

    monkeypatch.setattr(type(drafter.block), "attend_tree", causal)
    out = draft(drafter, decoder, inputs, (16, 4, 4))
    assert not torch.equal(out.tokens_M, wanted.tokens_M) or (out.scores_M - wanted.scores_M).abs().max() > 100 * CLOSE
