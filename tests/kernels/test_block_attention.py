"""Attention over blocks: its result, and that a row's bits are those of the row alone."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from draftwood.tests.exported import onnx_graph, opened

B, HEADS, KV_HEADS = 64, 4, 2
# Two fp32 programs that add in another order; measured 1e-6 at most.
RUNTIME = {"rtol": 0.0, "atol": 1e-5}


class Case(NamedTuple):
    """Rows after ``base`` tokens; ``paths`` are the tree slots that each row sees, in the order of their tokens."""

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    base: int
    paths: list[list[int]]


def case(dim: int, base: int, rows: int, seed: int) -> Case:
    random = np.random.default_rng(seed)
    paths = [[0]]
    for row in range(1, rows):
        paths.append([*paths[random.integers(max(0, row - 4), row)], row])
    key, value = random.standard_normal((2, KV_HEADS, 512, dim)).astype(np.float32)
    return Case(random.standard_normal((rows, HEADS * dim)).astype(np.float32), key, value, base, paths)


def alone(one: Case, row: int) -> Case:
    """A row with its path's tokens in the slots after the text, as in plain decoding."""
    path, key, value = one.paths[row], one.key.copy(), one.value.copy()
    own = slice(one.base, one.base + len(path))
    key[:, own], value[:, own] = (cache[:, [one.base + slot for slot in path]] for cache in (one.key, one.value))
    return Case(one.query[row : row + 1], key, value, one.base + len(path) - 1, [[0]])


def arguments(one: Case) -> dict[str, np.ndarray]:
    """The operator's arguments, written from its contract."""
    settled, rows = one.base // B, len(one.paths)
    blocks = -(-(one.base + rows) // B)
    key, value = (x.reshape(KV_HEADS, -1, B, x.shape[-1]).swapaxes(0, 1).copy() for x in (one.key, one.value))
    bias = np.full((rows, (blocks - settled) * B), -1e38, np.float32)
    home = np.zeros((blocks - settled, 1, 1, *bias.shape), np.float32)
    for row, path in enumerate(one.paths):
        places = [*range(settled * B, one.base), *(one.base + slot for slot in path)]
        for token, slot in enumerate(places, settled * B):
            bias[row, slot - settled * B] = 0
            home[token // B - settled, 0, 0, row, slot - settled * B] = 1
    return {
        "query": one.query[None],
        "settled_key": key[: settled or 1],
        "settled_value": value[: settled or 1],
        "open_key": key[settled:blocks],
        "open_value": value[settled:blocks],
        "bias": bias,
        "home": home,
        "weight": np.full((1, settled or 1), 2 if settled else 0, np.float32),
        "chain": np.full((1, 1 + len(home)), 2, np.float32),
        "nothing": np.array([0 if settled else -1e38], np.float32),
    }


class Operator(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.scale = dim**-0.5

    def forward(self, *tensors: Tensor) -> Tensor:
        return torch.ops.draftwood.block_attention(*tensors, HEADS, self.scale)


@pytest.fixture(scope="module", params=[64, 128], ids="dim={}".format)
def session(request: pytest.FixtureRequest):  # type: ignore[no-untyped-def]
    given = arguments(case(request.param, 200, 70, 0))
    auto = torch.export.Dim.AUTO
    moving = {"query": [1], "bias": [0, 1], "home": [0, 3, 4], "weight": [1], "chain": [1], "nothing": []}
    shapes = tuple(dict.fromkeys(moving.get(name, [0]), auto) for name in given)
    program = torch.export.export(
        Operator(request.param), tuple(map(torch.from_numpy, given.values())), dynamic_shapes=(shapes,), strict=False
    )
    return request.param, opened(onnx_graph(program, list(given), cpu=True))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("base", [1, 60, 64, 130], ids="base={}".format)
def test_it_computes_attention(session, base: int) -> None:  # type: ignore[no-untyped-def]
    dim, run = session
    one = case(dim, base, 9, base)
    (got,) = run.run(None, arguments(one))
    wanted = Operator(dim)(*map(torch.from_numpy, arguments(one).values()))
    np.testing.assert_allclose(got, wanted, **RUNTIME)
    for row, path in enumerate(one.paths):
        seen = [*range(base), *(base + slot for slot in path)]
        query_HD = one.query[row].reshape(HEADS, dim)
        for head in range(HEADS):
            weights = np.exp(one.key[head // 2, seen].astype(float) @ query_HD[head] * dim**-0.5)
            plain = weights @ one.value[head // 2, seen] / weights.sum()
            np.testing.assert_allclose(got[0, row, head * dim : (head + 1) * dim], plain, **RUNTIME)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("base", [1, 50, 63, 64, 120, 250], ids="base={}".format)
def test_a_row_has_the_bits_of_the_row_alone(session, base: int) -> None:  # type: ignore[no-untyped-def]
    dim, run = session
    one = case(dim, base, 33, base)
    (got,) = run.run(None, arguments(one))
    for row in range(33):
        (wanted,) = run.run(None, arguments(alone(one, row)))
        assert np.array_equal(got[0, row].view(np.int32), wanted[0, 0].view(np.int32)), row
