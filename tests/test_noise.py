"""Shared noise: independent standard Gumbel numbers, of the same bits wherever integers are added and multiplied."""

import math

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from draftwood.noise import (
    BLOCK,
    RepeatedIds,
    block_bounds,
    block_gumbels,
    bounds_at,
    gumbel_row,
    gumbels,
    key_of,
    keys_of,
    rounds,
)

# Of ids 0, 1, 2 and 70000, by the least and a large key.
KNOWN = (
    [2627576856, 3760493201, 1737149079, 2779285812],
    [1852126876, 948228842, 4179548761, 3448905048],
)
IDS = np.concatenate([np.arange(20_000), np.arange(2**31 - 5000, 2**31)]).astype(np.int32)


def uniforms(ids, seed, position):
    """The cipher's results for ids, int64 below 2^32."""
    upper, lower = rounds(ids >> 16, ids & 0xFFFF, key_of(seed, position))
    return upper.astype(np.int64) << 16 | lower


def excess(counts):
    """Chi-square of equally likely cells, in standard deviations above its mean; 6 are a false alarm in 7e5 at most."""
    expected, freedom = counts.mean(), counts.size - 1
    return (((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom)


class Node:
    """A tensor of an ONNX graph; arithmetic with it writes standard operators, shift and mask as division and rest."""

    def __init__(self, name, nodes, constants):
        self.name, self.nodes, self.constants = name, nodes, constants

    def _op(self, kind, other):
        if not isinstance(other, Node):
            constant = numpy_helper.from_array(np.array(other, np.int32), f"c{len(self.constants)}")
            self.constants.append(constant)
            other = Node(constant.name, self.nodes, self.constants)
        self.nodes.append(helper.make_node(kind, [self.name, other.name], [f"n{len(self.nodes)}"]))
        return Node(self.nodes[-1].output[0], self.nodes, self.constants)

    def __add__(self, other):
        return self._op("Add", other)

    def __mul__(self, other):
        return self._op("Mul", other)

    def __rshift__(self, bits):
        return self._op("Div", 1 << bits)

    def __and__(self, mask):
        return self._op("Mod", mask + 1)


def test_onnx_gives_the_bits_of_numpy():
    nodes, constants, seen = [], [], set()
    ids = Node("ids", nodes, constants)
    upper, lower = rounds(ids >> 16, ids & 0xFFFF, key_of(11, 5000))
    outputs = [helper.make_tensor_value_info(one.name, TensorProto.INT32, ["n"]) for one in (upper, lower)]
    given = [helper.make_tensor_value_info("ids", TensorProto.INT32, ["n"])]
    graph = helper.make_graph(nodes, "noise", given, outputs, initializer=constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.checker.check_model(model)
    options = onnxruntime.SessionOptions()
    options.use_per_session_threads = False  # the pool of tests/conftest.py
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    got = session.run(None, {"ids": IDS})
    for mine, theirs in zip(rounds(IDS >> 16, IDS & 0xFFFF, key_of(11, 5000)), got, strict=True):
        assert mine.dtype == np.int32 and np.array_equal(mine, theirs)
    seen.update(node.op_type for node in nodes)
    assert seen == {"Add", "Mul", "Div", "Mod"}


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_torch_gives_the_bits_of_numpy(kind):
    ids = torch.from_numpy(IDS).to(kind)
    got = rounds(ids >> 16, ids & 0xFFFF, key_of(2**64 - 1, 9))
    for mine, theirs in zip(rounds(IDS >> 16, IDS & 0xFFFF, key_of(2**64 - 1, 9)), got, strict=True):
        assert np.array_equal(mine, theirs.numpy())


def test_no_product_reaches_31_bits():
    """In 64 bits, at the ends of both halves and of what a key can hold."""
    ends = np.array([0, 1, 0x7FFF, 0x8000, 0xFFFE, 0xFFFF])
    factors = -(24576 + np.array([0, 1, 4096, 8191]))
    added = (1 << 25) + 256 * np.array([0, 65535])
    products = (ends[:, None, None] + factors[:, None]) * (ends[:, None, None] + factors)
    assert np.abs(products).max() < 2**31 and products.min() + added.min() >= 0
    assert products.max() + added.max() + 0xFFFF < 2**31


def test_the_numbers_are_those_of_the_first_release():
    """A seed's text must not change: known answers."""
    assert uniforms(np.array([0, 1, 2, 70_000], np.int32), 0, 0).tolist() == KNOWN[0]
    assert uniforms(np.array([0, 1, 2, 70_000], np.int32), 2**64 - 1, 2**40).tolist() == KNOWN[1]


def test_a_key_permutes_the_ids():
    assert np.unique(uniforms(np.arange(1 << 18, dtype=np.int32), 4, 4)).size == 1 << 18


@pytest.mark.parametrize("apart", [1, 2, BLOCK, 1000])
def test_numbers_of_neighbouring_ids_are_independent(apart):
    """Pairs of the four highest, middle and lowest bits, over low seeds and positions."""
    ids, cells = np.arange(4096, dtype=np.int32), {shift: np.zeros(256, np.int64) for shift in (28, 14, 0)}
    for position in range(400):
        drawn = uniforms(ids, position % 8, position // 8)
        for shift, counts in cells.items():
            part = drawn >> shift & 15
            counts += np.bincount(16 * part[:-apart] + part[apart:], minlength=256)
    assert max(map(excess, cells.values())) < 6


@pytest.mark.parametrize("step", [(0, 1), (1, 0), (1, -1)], ids=["positions", "seeds", "both"])
def test_numbers_of_neighbouring_keys_are_independent(step):
    ids, counts = np.arange(4096, dtype=np.int32), np.zeros(256, np.int64)
    for number in range(400):
        seed, position = number % 20, 1 + number // 20
        one, two = uniforms(ids, seed, position), uniforms(ids, seed + step[0], position + step[1])
        counts += np.bincount((one >> 28) * 16 + (two >> 28), minlength=256)
    assert excess(counts) < 6


def test_three_numbers_in_a_row_are_independent():
    ids, counts = np.arange(4096, dtype=np.int32), np.zeros(4096, np.int64)
    for position in range(400):
        part = uniforms(ids, 1, position) >> 28
        counts += np.bincount(256 * part[:-2] + 16 * part[1:-1] + part[2:], minlength=4096)
    assert excess(counts) < 6


def test_the_noise_is_standard_gumbel():
    """1.2 million numbers: their exponentials in 64 equally likely cells, and their moments."""
    rows = np.stack([gumbel_row(4096, key_of(seed, 3)) for seed in range(300)])
    uniform = np.exp(-np.exp(-rows))
    assert excess(np.bincount((uniform.reshape(-1) * 64).astype(int), minlength=64)) < 6
    # Standard errors 0.0012 and 0.0031 (Gumbel's fourth moment); five of each.
    assert abs(rows.mean() - 0.577216) < 0.006 and abs(rows.var() - math.pi**2 / 6) < 0.016
    # Ids of one block share a number; the correlation of two has a standard error of 0.0009.
    for apart in (1, 5, BLOCK):
        assert abs(np.corrcoef(rows[:, :-apart].reshape(-1), rows[:, apart:].reshape(-1))[0, 1]) < 0.0045


def test_the_tail_is_there():
    """How many of 64 million blocks' bounds are above 18 and 20.5: Poisson counts, within five standard deviations."""
    count, blocks = {18.0: 0, 20.5: 0}, 1 << 16
    for position in range(250):
        bounds = block_bounds(blocks * BLOCK, key_of(8, position))
        count = {gap: seen + int((bounds > gap).sum()) for gap, seen in count.items()}
    for gap, seen in count.items():
        expected = 250 * blocks * BLOCK * math.exp(-gap)
        assert abs(seen - expected) < 5 * math.sqrt(expected)


def test_the_forms_agree():
    """A row, some ids, some blocks, several positions at once, and each block's bound."""
    key, row = key_of(5, 9), gumbel_row(1000, key_of(5, 9))
    ids = np.array([999, 3, 64, 3], np.int32)
    assert np.array_equal(gumbels(ids, key), row[ids])
    assert np.array_equal(RepeatedIds.of(ids.astype(np.int64)).gumbels(key), row[ids])
    assert np.array_equal(block_gumbels(np.array([2], np.int32), key)[0], row[128:192])
    both = gumbels(np.stack([ids, ids]), keys_of(5, (9, 10)))
    assert np.array_equal(both[0], row[ids]) and np.array_equal(both[1], gumbels(ids, key_of(5, 10)))
    whole = gumbel_row(16 * BLOCK, key)
    assert np.array_equal(block_bounds(1000, key), whole.reshape(16, BLOCK).max(1))
    for seed, position in ((5, 9), (5, 31), (5, 32), (2**64 - 1, 2**40)):
        assert np.array_equal(bounds_at(70_001, seed, position), block_bounds(70_001, key_of(seed, position)))


def test_the_least_of_a_block_is_at_every_lane():
    lanes = np.concatenate([gumbel_row(1 << 14, key_of(1, p)).reshape(-1, BLOCK).argmax(1) for p in range(100)])
    assert excess(np.bincount(lanes, minlength=BLOCK)) < 6
