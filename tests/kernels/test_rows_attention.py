"""A CPU's attention of a step's rows: the reference by hand, and onnxruntime against the reference."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from draftwood.runtime.engines.cpu import Before, places
from draftwood.tests.exported import onnx_graph, opened

# T rows, A of them in attention, N query heads, K key/value heads, D head dimension, C slots, S seen slots, P positions
N, K, C, P = 4, 2, 32, 32
# fp32 against float64 over sums of at most 32 terms of order 1, and against another order; measured 2e-6 at most.
TOLERANCE = {"rtol": 0.0, "atol": 1e-5}
EPSILON = 1e-5


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Rows(nn.Module):
    """Over caches with text in all slots; with or without norms of queries and keys."""

    def __init__(self, dim: int, normed: bool) -> None:
        super().__init__()
        angles = noise(P, dim // 2, seed=1)
        self.tables = angles.cos(), angles.sin()
        self.gains = (noise(dim, seed=2), noise(dim, seed=3)) if normed else (None, None)
        self.dim, self.caches = dim, (noise(1, K, C, dim, seed=4), noise(1, K, C, dim, seed=5))

    def forward(self, qkv, key_cache, value_cache, *given):  # type: ignore[no-untyped-def]
        caches = key_cache, value_cache
        return torch.ops.draftwood.rows_attention(qkv, *caches, *self.tables, *given, *self.gains, N, K, EPSILON)

    def arguments(self, parents: list[int], kept: int, more: int = 0) -> tuple[Tensor, ...]:
        """A tree after ``kept`` slots, given by every row's parent; the last row stands ``more`` times more."""
        rows, count = len(parents), len(parents) + more
        seen, depths = torch.eye(rows, dtype=torch.bool), [0] * rows
        for row in range(1, rows):
            seen[row] |= seen[parents[row]]
            depths[row] = depths[parents[row]] + 1
        bias = torch.zeros(1, 1, count, kept + count)
        bias[0, 0, :rows, kept : kept + rows][~seen] = -1e38
        queries = torch.tensor([[*range(rows), *[rows - 1] * more]])
        results = torch.tensor([[0, row] for row in range(rows)])
        positions = kept + torch.tensor([[*depths, *range(rows, count)]])
        last, total = torch.tensor([kept + count - 1], dtype=torch.int32), torch.tensor(kept + count, dtype=torch.int32)
        qkv = noise(rows, (N + 2 * K) * self.dim, seed=6)
        return (qkv, *self.caches, queries, results, positions, bias, last, total)


def with_heads_as_rows(given: tuple[Tensor, ...], rows: int) -> tuple[Tensor, ...]:
    """The arguments of the same rows with their query heads as rows."""
    qkv, key, value, _, _, positions, bias, _, total = given
    kept = int(total) - bias.shape[2]
    at = places(rows, K, N // K, Before())
    count, row_A = len(at.row_A), torch.from_numpy(at.row_A)
    seen = bias[0, 0, :, kept : kept + rows][row_A] == 0
    hidden = torch.full((1, 1, count, kept + count), -1e38)
    hidden[..., :kept] = 0
    hidden[0, 0, :, kept : kept + rows][seen & (torch.arange(rows) <= row_A[:, None])] = 0
    last, total = (torch.tensor(size, dtype=torch.int32) for size in ([kept + count - 1], kept + count))
    numbers = torch.from_numpy(at.queries_1AE2), torch.from_numpy(at.results_TN3)
    return (qkv, key, value, *numbers, positions[:, row_A], hidden, last, total)


CASES = {
    "alone": ([0], 9, 1),
    "chain on nothing": ([0, 0, 1], 0, 0),
    "tree": ([0, 0, 0, 1, 2], 9, 0),
    "tree, its last row twice": ([0, 0, 0, 1, 2], 9, 1),
}
FORMS = pytest.mark.parametrize(("dim", "normed"), [(16, False), (16, True), (8, False), (8, True)])


@FORMS
@pytest.mark.parametrize("case", CASES)
def test_the_reference_is_attention_over_kept_slots_and_ancestors(dim: int, normed: bool, case: str) -> None:
    layer, (parents, kept, _) = Rows(dim, normed), CASES[case]
    given = layer.arguments(*CASES[case])
    out, keys, values = layer(*given)
    depths, paths = [0], [[0]]
    for row, parent in enumerate(parents[1:], 1):
        depths.append(depths[parent] + 1)
        paths.append([*paths[parent], row])
    heads = given[0].double().unflatten(-1, (N + 2 * K, dim)).numpy()
    cos, sin = (table.double().numpy() for table in layer.tables)

    def turned(row: int, head: int) -> np.ndarray:
        x, gain = heads[row, head], layer.gains[0 if head < N else 1]
        if gain is not None:
            x = x / np.sqrt((x**2).mean() + EPSILON) * gain.double().numpy()
        low, high = np.split(x, 2)
        c, s = cos[kept + depths[row]], sin[kept + depths[row]]
        return np.concatenate((low * c - high * s, high * c + low * s))

    for row, path in enumerate(paths):
        for head in range(N):
            group, text = head // (N // K), slice(0, kept)
            k_SD = np.concatenate((layer.caches[0][0, group, text], [turned(one, N + group) for one in path]))
            v_SD = np.concatenate((layer.caches[1][0, group, text], [heads[one, N + K + group] for one in path]))
            weights = np.exp(k_SD @ turned(row, head) * dim**-0.5)
            want_D = weights @ v_SD / weights.sum()
            np.testing.assert_allclose(out[row, head * dim : (head + 1) * dim], want_D, **TOLERANCE)
    for row in range(len(parents)):
        for group in range(K):
            np.testing.assert_allclose(keys[0, group, kept + row], turned(row, N + group), **TOLERANCE)
            np.testing.assert_allclose(values[0, group, kept + row], heads[row, N + K + group], **TOLERANCE)


@FORMS
@pytest.mark.parametrize("case", [name for name, (_, kept, _) in CASES.items() if kept])
def test_heads_as_rows_are_the_same_rows(dim: int, normed: bool, case: str) -> None:
    layer, (parents, kept, _) = Rows(dim, normed), CASES[case]
    given, rows = layer.arguments(*CASES[case]), len(parents)
    grouped = layer(*with_heads_as_rows(given, rows))
    for ours, wanted in zip(grouped, layer(*given), strict=True):
        cut = slice(None) if ours.ndim == 2 else (slice(None), slice(None), slice(kept + rows))
        np.testing.assert_allclose(ours[cut], wanted[cut], **TOLERANCE)


def session_of(layer: Rows, example: tuple[Tensor, ...]) -> Callable[[tuple[Tensor, ...]], list[np.ndarray]]:
    """onnxruntime's layer, for rows of any number."""
    auto = torch.export.Dim.AUTO
    sizes = ({0: auto}, None, None, {1: auto}, {0: auto}, {1: auto}, {2: auto, 3: auto}, None, None)
    program = torch.export.export(layer, example, dynamic_shapes=(*sizes[:3], sizes[3:]))
    session = opened(onnx_graph(program, cpu=True))
    names = [each.name for each in session.get_inputs()]
    return lambda given: session.run(None, {name: value.numpy() for name, value in zip(names, given, strict=True)})


@FORMS
def test_onnxruntime_computes_the_reference(dim: int, normed: bool) -> None:
    layer = Rows(dim, normed)
    computed = session_of(layer, layer.arguments([0, 0, 0, 1, 2], 9, 1))
    for case in CASES.values():
        given = layer.arguments(*case)
        seen = int(given[-1])  # later slots are undefined if the buffers are not shared
        for ours, wanted in zip(computed(given), layer(*given), strict=True):
            cut = slice(None) if ours.ndim == 2 else (slice(None), slice(None), slice(seen))
            np.testing.assert_allclose(ours[cut], wanted.numpy()[cut], **TOLERANCE)


@FORMS
def test_onnxruntime_gives_heads_as_rows_the_bits_of_whole_rows(dim: int, normed: bool) -> None:
    """Or the text of a launch with one form would not be that of a launch with the other."""
    layer = Rows(dim, normed)
    example = layer.arguments([0, 0, 0, 1, 2], 9, 1)
    whole, grouped = session_of(layer, example), session_of(layer, with_heads_as_rows(example, 5))
    for parents in ([0], [0, 0], [0, 0, 1, 2], [0, 0, 0, 1, 2], list(range(-1, 8))[1:]):
        rows = [max(0, parent) for parent in parents]
        for kept in (1, 8, 11):
            given = layer.arguments(rows, kept, int(len(rows) == 1))
            seen = kept + len(rows)
            for ours, wanted in zip(grouped(with_heads_as_rows(given, len(rows))), whole(given), strict=True):
                cut = slice(None) if ours.ndim == 2 else (slice(None), slice(None), slice(seen))
                np.testing.assert_array_equal(ours[cut].view(np.int32), wanted[cut].view(np.int32))
