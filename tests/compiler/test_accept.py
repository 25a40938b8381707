"""Acceptance as graphs do it: if a draw is sure it is the host's, and the walk is the host's walk."""

import itertools
import math
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftwood.compiler.onnx.lowering import lower_to_onnx
from draftwood.compiler.steps.accept import accept_step, walked
from draftwood.compiler.steps.draw import DrawSettings, greedy, sampled
from draftwood.compiler.steps.noise import block_noise, ciphered, level_noise, own_noise
from draftwood.compiler.steps.step import StepSizes
from draftwood.compiler.steps.tracing import trace
from draftwood.contract import KEPT
from draftwood.noise import BLOCK, LANE, LEAST, gumbel_row, key_of, keys_of, numbers_of, rounds
from draftwood.runtime.engines.inputs import fill_settings
from draftwood.runtime.speculation.sampling import Sampling, distribution, draw
from draftwood.trees import Topology, tensorize, walk, walk_tables

LEVELS, LENGTH = 4, 100
RNG = np.random.default_rng
FILTERS: list[dict] = [{}, {"top_k": 5}, {"top_k": 60}, {"top_p": 0.9}, {"top_p": 0.4}, {"top_p": 0.7, "top_k": 12}]


def settings(sampling: Sampling, vocabulary: int, levels: int = LEVELS, position: int = LENGTH + 1) -> DrawSettings:
    inputs = {"keys": np.zeros((2, 6, levels), np.int32), "temperature": np.zeros(1, np.float32)}
    inputs |= {"free": np.zeros(1, np.bool_)}
    inputs |= {name: np.zeros((2, KEPT), np.float32) for name in ("mass", "limit")}
    fill_settings(inputs, sampling, position, vocabulary)
    return DrawSettings(*map(torch.from_numpy, inputs.values()))


def drawn(logits: np.ndarray, levels: np.ndarray, sampling: Sampling) -> tuple[np.ndarray, np.ndarray]:
    given = settings(sampling, logits.shape[1])
    tokens, sure = sampled(torch.from_numpy(logits), torch.from_numpy(levels), given)
    return tokens.numpy(), sure.numpy()


def compared(logits: np.ndarray, levels: np.ndarray, sampling: Sampling) -> float:
    """Every sure row is the host's; gives the share that is not sure."""
    tokens, sure = drawn(logits, levels, sampling)
    for row in np.flatnonzero(sure):
        assert tokens[row] == draw(logits[row], sampling, LENGTH + 1 + int(levels[row]))
    return float(1 - sure.mean())


@pytest.mark.parametrize("vocabulary", [8, 101, 4160, 9000])
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_a_sure_draw_is_the_hosts(vocabulary: int, filters: dict) -> None:
    """Peaked and flat rows, fp32 and bf16, whose equal logits are many; of 96 rows few are left to the host."""
    random, unsure = RNG(vocabulary), []
    for seed in range(6):
        logits = (random.standard_normal((16, vocabulary)) * (2, 4, 6)[seed % 3]).astype(np.float32)
        logits[:, : vocabulary // 2] += 8 * random.random()
        if seed % 2:
            logits = torch.from_numpy(logits).bfloat16().float().numpy()
        logits[3, 1:5], logits[4] = -np.inf, np.round(logits[4])
        sampling = Sampling(temperature=(0.3, 0.8, 1.2)[seed // 2], seed=seed, **filters)
        unsure.append(compared(logits, random.integers(0, LEVELS, 16), sampling))
    if vocabulary <= BLOCK or "top_p" not in filters:
        assert np.mean(unsure) <= 0.1


@given(st.data())
def test_any_small_row(data: st.DataObject) -> None:
    """Logits of few values, so that ties decide which tokens top-k and top-p keep."""
    rows = st.lists(st.lists(st.integers(-3, 3), min_size=7, max_size=7), min_size=2, max_size=2)
    logits = np.array(data.draw(rows), np.float32) / 2
    sampling = Sampling(
        temperature=data.draw(st.sampled_from([0.05, 0.7, 1.0, 3.0])),
        top_k=data.draw(st.integers(0, 8)),
        top_p=data.draw(st.sampled_from([1e-4, 0.25, 0.5, 0.99, 1.0])),
        seed=data.draw(st.integers(0, 99)),
    )
    compared(logits, np.array([0, 3]), sampling)


def test_what_cannot_be_sure_is_not() -> None:
    """Two tokens a hair apart; a nucleus of all tokens; NaN, +inf, nothing but -inf; and greedy alike."""
    sampling, noise = Sampling(temperature=1.0, seed=3), gumbel_row(200, key_of(3, LENGTH + 1))
    logits = np.zeros((5, 200), np.float32)
    logits[0] = -30
    logits[0, [7, 90]] = 5 - noise[[7, 90]]
    logits[1, 0], logits[2, 0], logits[3], logits[4, 4] = np.nan, np.inf, -np.inf, 50
    assert drawn(logits, np.zeros(5, np.int64), sampling)[1].tolist() == [False] * 4 + [True]
    flat = np.zeros((1, 200), np.float32)
    assert not drawn(flat, np.zeros(1, np.int64), Sampling(temperature=1.0, top_p=0.9))[1].any()
    tokens, sure = greedy(torch.from_numpy(logits))
    assert sure.tolist() == [True, False, False, False, True] and int(tokens[4]) == 4


def test_the_noise_differs_from_the_hosts_by_rounding_alone() -> None:
    """Of 9000 ids a position; the margin of a draw is a hundred times what is allowed here."""
    numbers = torch.from_numpy(numbers_of(5, range(40, 44)))
    (least, _), (_, lane) = block_noise(numbers, -(-9000 // BLOCK))
    ids = torch.arange(9000, dtype=torch.int32)
    own = torch.where(lane[:, ids // BLOCK] == ids % BLOCK, 0.0, own_noise(numbers, ids.expand(4, -1)))
    got = -torch.log(own + least[:, ids // BLOCK] / BLOCK).numpy()
    want = np.stack([gumbel_row(9000, key_of(5, position)) for position in range(40, 44)])
    assert np.abs(got - want).max() < 1e-5


def test_the_whole_numbers_are_the_hosts() -> None:
    """Bit for bit, of ids up to 2^22 and of what stands for blocks above all ids."""
    keys, ids = keys_of(5, range(40, 44)), RNG(2).integers(0, 1 << 22, 5000).astype(np.int32)
    numbers = torch.from_numpy(numbers_of(5, range(40, 44)))
    for high in (ids >> 16, (ids >> 16) + LEAST, (ids >> 16) + LANE):
        halves = torch.from_numpy(high).expand(4, -1), torch.from_numpy(ids & 0xFFFF).expand(4, -1)
        for got, want in zip(ciphered(*halves, numbers), rounds(high, ids & 0xFFFF, keys), strict=True):
            assert np.array_equal(got.numpy(), want)


@pytest.mark.parametrize("filters", [{}, {"top_k": 4}, {"top_p": 0.8}], ids=str)
def test_the_draws_law_is_exact(filters: dict) -> None:
    """Chi-square of 6000 positions against the exact distribution; six deviations: false alarms in 8e3 and 2e3."""
    logits, sampling, count = RNG(1).normal(0, 1.5, 8).astype(np.float32), Sampling(temperature=0.9, **filters), 6000
    given = settings(sampling, 8, levels=count)
    tokens, sure = sampled(torch.from_numpy(np.tile(logits, (count, 1))), torch.arange(count), given)
    assert sure.float().mean() > 0.99
    exact = distribution(logits, sampling) * count
    seen = np.bincount(tokens.numpy(), minlength=8)
    assert not seen[exact == 0].any()
    freedom = int((exact > 0).sum()) - 1
    excess = ((seen - exact) ** 2)[exact > 0] @ (1 / exact[exact > 0])
    assert excess < freedom + 6 * math.sqrt(2 * freedom)


def all_trees(most: int) -> Iterator[Topology]:
    """Every ordered tree of one to ``most`` draft nodes: non-decreasing parents that precede their children."""
    for nodes in range(1, most + 1):
        for parents in itertools.product(*(range(row) for row in range(1, nodes + 1))):
            if all(left <= right for left, right in itertools.pairwise(parents)):
                yield Topology((0, *parents), (0, *(parents[:row].count(p) for row, p in enumerate(parents))))


def tables(tree: Topology, places: int) -> tuple[torch.Tensor, ...]:
    """Depths, parents and the tables of a walk, a padded row at the end."""
    buffers = tensorize(tree)
    rows = np.append(buffers.depths, 0), np.append(buffers.parents, 0)
    return tuple(torch.from_numpy(table.copy()) for table in (*rows, *walk_tables(buffers, tree.rows + 1, places)))


def walked_one(tokens: torch.Tensor, tables: tuple[torch.Tensor, ...], drawn: torch.Tensor) -> list[int]:
    """The accepted path of one text, after the one that the graph has is seen to repeat its last row."""
    path, length = walked(*(table[None] for table in (tokens, *tables, drawn)))
    rows: list[int] = path[0].tolist()
    count = int(length)
    assert set(rows[count - 1 :]) == {rows[count - 1]}
    return rows[:count]


def test_the_walk_is_the_hosts_on_every_tree_of_up_to_five_nodes() -> None:
    """Tokens of a vocabulary of three, so that siblings often carry the same."""
    random = RNG(2)
    for tree in all_trees(5):
        for _ in range(10):
            tokens, draws = random.integers(0, 3, (2, tree.rows + 1))
            tokens[-1] = tokens[0]
            path = walked_one(torch.from_numpy(tokens), tables(tree, 7), torch.from_numpy(draws))
            want = walk(tensorize(tree), tokens[:-1], lambda row, depth, draws=draws: int(draws[row])).rows
            assert tuple(path) == want


@cache
def teacher(prefix: tuple[int, ...]) -> np.ndarray:
    """Logits of eight tokens that follow from the whole prefix."""
    return RNG((5, *prefix)).normal(0, 1.5, 8).astype(np.float32)


@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.8}], ids=str)
def test_every_tree_of_up_to_five_nodes_gives_the_plain_text(filters: dict) -> None:
    """64 trees, each drafted by who knows the teacher, in steps that draw and walk as a graph does."""
    trees = list(all_trees(5))
    assert len(trees) == 64
    for number, tree in enumerate(trees):
        sampling, text = Sampling(temperature=0.9, seed=number, **filters), (0,)
        while len(text) < 6:
            text += accepted_tokens(tree, sampling, text)
        for at in range(1, 6):
            assert text[at] == draw(teacher(text[:at]), sampling, at)


def accepted_tokens(tree: Topology, sampling: Sampling, text: tuple[int, ...]) -> tuple[int, ...]:
    """One step after a text, whose last token is the root."""
    of_tree = tables(tree, 6)
    rows = [text]
    for row in range(1, tree.rows):
        above = rows[tree.parents[row]]
        rows.append((*above, int(np.argsort(-teacher(above))[tree.ranks[row]])))
    logits = torch.from_numpy(np.stack([teacher(row) for row in (*rows, text)]))
    tokens = torch.tensor([row[-1] for row in (*rows, text)])
    drawn_T, sure_T = sampled(logits, of_tree[0], settings(sampling, 8, levels=6, position=len(text)))
    chosen = walked_one(tokens, of_tree, drawn_T)
    assert sure_T[chosen].all()
    return (*tokens[chosen[1:]].tolist(), int(drawn_T[chosen[-1]]))


def test_onnxruntime_accepts_alike(tmp_path: Path) -> None:
    """The step as standard operators, against itself in PyTorch: every output, of a vocabulary of many blocks."""
    step = accept_step("sampled", 5, StepSizes(branch_rows=5, path_rows=LEVELS), 5000, features=6, kept_rows=LEVELS)
    lower_to_onnx(step, trace(step), {}, "none", tmp_path / "accept.onnx")
    options = onnxruntime.SessionOptions()
    options.use_per_session_threads = False  # the pool of tests/conftest.py
    session = onnxruntime.InferenceSession(str(tmp_path / "accept.onnx"), options, providers=["CPUExecutionProvider"])
    buffers, random = tensorize(Topology.backbone(2, 2)), RNG(3)
    for seed in range(4):
        logits = (4 * random.standard_normal((5, 5000))).astype(np.float32)
        how = settings(Sampling(temperature=0.9, seed=seed, top_k=20 * (seed % 2)), 5000)
        given = (random.integers(0, 9, 5), buffers.depths, buffers.parents, *walk_tables(buffers, 5, LEVELS))
        inputs = [logits, *given, random.random((5, 6), np.float32), *(t.numpy() for t in how)]
        names = [spec.name for spec in step.signature.inputs]
        got = session.run(None, dict(zip(names, inputs, strict=True)))
        want = step.module(*(torch.tensor(array) for array in inputs))
        assert all(np.array_equal(one, other.numpy()) for one, other in zip(got, want, strict=True))


@pytest.mark.parametrize("vocabulary", [40, 8200])
def test_noise_of_whole_levels_is_the_hosts(vocabulary: int) -> None:
    """fp32 of numbers up to 27: off by a few 1e-6, and a draft is a proposal alone."""
    ids = np.sort(RNG(0).choice(vocabulary, 30, replace=False))
    given = settings(Sampling(temperature=0.8, seed=5), vocabulary)
    whole, some = level_noise(given.numbers, vocabulary), level_noise(given.numbers, vocabulary, torch.from_numpy(ids))
    assert torch.equal(whole[:, torch.from_numpy(ids)], some)
    for level, row in enumerate(whole.numpy()):
        assert np.abs(row - gumbel_row(vocabulary, key_of(5, LENGTH + 1 + level))).max() < 1e-5
