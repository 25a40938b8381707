"""Every operator of the table against PyTorch: as torchair's converters make it, and by its definition alone."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftwood.compiler.ge.graph import Declared, Edge, Graph, Node
from draftwood.compiler.ge.interpreter import Interpreter, shapes
from draftwood.compiler.ge.operators import OPERATORS, BoundNode
from draftwood.compiler.ge.torchair_bridge import convert
from draftwood.errors import LoweringError
from draftwood.kernels import eager_attention

INF = float("inf")
# All arithmetic is PyTorch's own in the same type, so results are equal; exceptions give their reason at their place.
EXACT = (0.0, 0.0)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def whole(*shape: int, low: int = 0, high: int, seed: int = 0) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


Cases = dict[str, Callable[..., Any]]


@dataclass(frozen=True)
class Family:
    """Interpreted and eager outputs of every case, and the types of operators that were interpreted."""

    pairs: dict[str, list[tuple[Tensor, Tensor]]]
    types: frozenset[str]


def interpret(cases: Cases, inputs: tuple[Tensor, ...]) -> Family:
    """All cases as one graph, for every lowering costs half a second."""

    class Module(nn.Module):
        def forward(self, *xs: Tensor) -> list[list[Tensor]]:
            return [listed(function(*xs)) for function in cases.values()]

    program = torch.export.export(Module(), inputs, strict=False)
    graph = Graph.of(convert(program, {}, "cases"))
    before, found = [x.clone() for x in inputs], {}

    def note(node: Node, outputs: tuple[Tensor, ...]) -> None:
        found[node.name] = tuple((t.dtype, tuple(t.shape)) for t in outputs)

    names = [node.name for node in graph.sources()]
    got = iter(Interpreter(graph, {}).run(dict(zip(names, inputs, strict=True)), note))
    assert all(torch.equal(x, old) for x, old in zip(inputs, before, strict=True)), "an input was written"
    assert shapes(graph) == found
    pairs = {name: [(next(got), want) for want in listed(function(*inputs))] for name, function in cases.items()}
    return Family(pairs, frozenset(graph.counts()))


def listed(value: Any) -> list[Tensor]:
    return list(value) if isinstance(value, tuple | list) else [value]


def close(pairs: list[tuple[Tensor, Tensor]], tolerance: tuple[float, float] = EXACT) -> None:
    assert pairs
    for have, want in pairs:
        torch.testing.assert_close(have, want, rtol=tolerance[0], atol=tolerance[1], equal_nan=True)


def fused(mode: int) -> Callable[..., Tensor]:
    def attend(q: Tensor, k: Tensor, v: Tensor, masked: Tensor | None) -> Tensor:
        return torch.ops.npu.npu_fused_infer_attention_score(
            q,
            k,
            v,
            atten_mask=masked,
            num_heads=4,
            num_key_value_heads=2,
            scale=0.3,
            input_layout="BNSD",
            sparse_mode=mode,
        )[0]

    return attend


# Functions of x and y, [3, 5] floats.
FLOAT_CASES: Cases = {
    "arithmetic": lambda x, y: (x + y, x - y, x * y, x / y, -x, x.abs()),
    "scalars": lambda x, y: (x + 2, x / 3),
    "exponentials": lambda x, y: (x.exp(), (x.abs() + 0.1).log(), x.abs().log1p()),
    "sums of products": lambda x, y: (
        torch.ops.draftwood.multiply_add(x, x, y),
        torch.ops.draftwood.add_scaled(x, y, 0.25),
    ),
    "gates": lambda x, y: (x.sigmoid(), x.tanh(), F.silu(x)),
    "quotients": lambda x, y: x.div(y, rounding_mode="floor"),
    "bounds": lambda x, y: (x.minimum(y), x.maximum(y), x.clamp(-0.5, 0.5), x.clamp(min=0.1), y.clamp(max=0.1)),
    "comparison": lambda x, y: (x == y, x != y, x < y, x <= y, x > y, x >= y),
    "choice": lambda x, y: (torch.where(x > y, x, y), x.masked_fill(x > y, -INF)),
    "broadcast": lambda x, y: (x[:, None] * y[None], x[:1] + y, x[:, :1] - y),
    "reductions": lambda x, y: (x.sum(), x.sum(-1), x.max(), y.amax(0, keepdim=True)),
    "winners": lambda x, y: (x.argmax(-1), x.argmax()),
    "ranks": lambda x, y: (*x.topk(3, -1), *x.topk(2, 0, largest=False), *x.sort(-1, descending=True), *y.sort(0)),
    "the best": lambda x, y: (
        *torch.ops.draftwood.best(x, 2),
        torch.ops.draftwood.picked(y, torch.ops.draftwood.best(x, 3)[1]),
    ),
    "softmax": lambda x, y: (x.softmax(-1), y.softmax(0), x.log_softmax(-1)),
    "matrices": lambda x, y: (x @ y.t(), x.t() @ y),
    "batches": lambda x, y: x[None].expand(2, 3, 5) @ y.t()[None].expand(2, 5, 3),
    "norm": lambda x, y: torch.ops.npu.npu_rms_norm(x, y[0], 1e-5),
    "norm of a sum": lambda x, y: torch.ops.npu.npu_add_rms_norm(x, y, y[1], 1e-6),
    "fills": lambda x, y: (x + torch.arange(5), x.new_zeros(2, 3), torch.full_like(x, 7.0), torch.zeros_like(y)),
    "joins": lambda x, y: (torch.cat((x, y, x), 1), torch.stack((x, y), 1)),
    "joins of one row": lambda x, y: torch.cat([one[:1].repeat(1, 16) for one in (x, y)], 1),
    "padding": lambda x, y: (F.pad(x, (1, 2, 0, 3)), F.pad(y, (2, 0), value=-INF)),
    "splits": lambda x, y: (*x.split((2, 3), 1), *y.split(2, 1), *x.chunk(3, 0)),
    "slices": lambda x, y: (x[1:, ::2], y[:, -3:-1], x[2], y[:, -1], x[:, None, 1:9]),
    "order of dimensions": lambda x, y: (x.t().contiguous(), x.t().flatten(), x[None, :, None].permute(3, 0, 2, 1)),
    "rank": lambda x, y: (x.unsqueeze(0).unsqueeze(-1), x[:1].squeeze(0), y.reshape(5, 3)),
    "repetition": lambda x, y: (x.repeat(2, 3), y[:1].expand(4, 5)),
    "conversion": lambda x, y: (x.half(), y.to(torch.int32), (x * y).long(), x.bool(), x.half().float()),
}
# Functions of n in -7..7 and m in 1..5, and of b and c, bools, all [3, 4].
INTEGER_CASES: Cases = {
    "arithmetic": lambda n, m, b, c: (n + m, n - m, n * m, n // m, -n, n.abs()),
    "scalars": lambda n, m, b, c: (n // 3, 2 * n + 1, n.clamp(-2, 3)),
    "bounds": lambda n, m, b, c: (n.minimum(m), n.maximum(m), n.max(), n.sum(0)),
    "bits": lambda n, m, b, c: n & m,
    "logic": lambda n, m, b, c: (b & c, b | c, ~b, b == c),
    "quantifiers": lambda n, m, b, c: (b.any(), b.any(1), b.all(), b.sum(1)),
    "choice": lambda n, m, b, c: (torch.where(b, n, m), n.masked_fill(c, 0), torch.where(b, 1, m)),
    "order": lambda n, m, b, c: n.flatten().sort().values,
    "comparison": lambda n, m, b, c: (n == m, n < 2, n[:, None] >= m[None]),
    "int32": lambda n, m, b, c: (n.int() + m.int(), n.int().sum(1), n.float()),
    "promotion": lambda n, m, b, c: (n + m.int(), n * 0.5, b.long() + n, n.int() / m.int()),
}
# Functions of floats x [6, 5] and of places i [4] and j [4].
PLACE_CASES: Cases = {
    "embedding": lambda x, i, j: (F.embedding(i, x), x.index_select(1, j), x[-2]),
    "gather": lambda x, i, j: (x.gather(0, i[None]), x.gather(1, j[None] - 1)),
    "write": lambda x, i, j: torch.ops.npu.npu_scatter_nd_update(x, j[:2, None], x[:2] + 1),
}
# Which experts each of three rows goes to.
EXPERTS = torch.tensor([[2, 0], [1, 2], [0, 1]], dtype=torch.int32)
GROUPS = {"split_item": 3, "dtype": -1, "transpose_weight": True, "group_list_type": 1}


def mixture(x: Tensor, scores: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    shares, ids, _ = torch.ops.npu.npu_moe_gating_top_k_softmax(scores, None, 2)
    return torch.ops.draftwood.experts(x, ids, shares, gate_up, down)


# Functions of rows x [4, 3, 8], a matrix w [5, 8], a vector z [5], q [1, 4, 5, 8], k and v [1, 2, 12, 8], a mask.
LAYER_CASES: Cases = {
    "linear": lambda x, w, z, q, k, v, masked, y: F.linear(x, w),
    "linear with bias": lambda x, w, z, q, k, v, masked, y: F.linear(x[0], w, z),
    "rotary of 64": lambda x, w, z, q, k, v, masked, y: torch.ops.npu.npu_rotary_mul(y, y[:, :, :1], y[:, :, 1:2]),
    "rotary pair": lambda x, w, z, q, k, v, masked, y: torch.ops.draftwood.rotary_pair(
        y, y[:, :, :2] + 1, y[:, :, :1], y[:, :, 1:2]
    ),
    "rotary": lambda x, w, z, q, k, v, masked, y: torch.ops.npu.npu_rotary_mul(x, x[:, :1] + 1, x[:, 1:2] - 1),
    "gate": lambda x, w, z, q, k, v, masked, y: (torch.ops.npu.npu_swiglu(x, 0), torch.ops.npu.npu_swiglu(x)),
    "attention, mode 0": lambda x, w, z, q, k, v, masked, y: fused(0)(q, k, v, masked),
    "attention, mode 1": lambda x, w, z, q, k, v, masked, y: fused(1)(q, k, v, masked),
    "attention, no mask": lambda x, w, z, q, k, v, masked, y: fused(0)(q, k, v, None),
    "gating": lambda x, w, z, q, k, v, masked, y: torch.ops.npu.npu_moe_gating_top_k_softmax(w, None, 3),
    "experts": lambda x, w, z, q, k, v, masked, y: mixture(x[0], w[:3, :4], q[0, :, :4], q[0, :, :2].mT),
    "log of a sum": lambda x, w, z, q, k, v, masked, y: (k.logsumexp(2, keepdim=True), w.logsumexp(0)),
    "log of no sum": lambda x, w, z, q, k, v, masked, y: x[0].masked_fill(x[0] > -9, -INF).logsumexp(1),
}


@cache
def floats(dtype: torch.dtype) -> Family:
    inputs = random(3, 5, seed=1, dtype=dtype), random(3, 5, seed=2, dtype=dtype)
    return interpret(FLOAT_CASES, inputs)


@cache
def integers() -> Family:
    numbers = whole(3, 4, low=-7, high=8), whole(3, 4, low=1, high=6, seed=1)
    return interpret(INTEGER_CASES, (*numbers, *(whole(3, 4, high=2, seed=s).bool() for s in (2, 3))))


@cache
def places(dtype: torch.dtype) -> Family:
    inputs = random(6, 5, dtype=dtype), whole(4, high=5), torch.tensor([3, 1, 2, 1])
    return interpret(PLACE_CASES, inputs)


@cache
def layers(dtype: torch.dtype) -> Family:
    sizes = ((4, 3, 8), (5, 8), (5,), (1, 4, 5, 8), (1, 2, 12, 8), (1, 2, 12, 8))
    masked = whole(1, 1, 5, 12, high=2).bool()
    masked[..., 3, :] = True  # a row that sees nothing gives zeros
    inputs = (*(random(*size, seed=i, dtype=dtype) for i, size in enumerate(sizes)), masked)
    return interpret(LAYER_CASES, (*inputs, random(1, 4, 3, 64, seed=9, dtype=dtype)))


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@DTYPES
@pytest.mark.parametrize("name", FLOAT_CASES)
def test_floats(name: str, dtype: torch.dtype) -> None:
    close(floats(dtype).pairs[name])


@pytest.mark.parametrize("name", INTEGER_CASES)
def test_integers_and_bools(name: str) -> None:
    close(integers().pairs[name])


@DTYPES
@pytest.mark.parametrize("name", PLACE_CASES)
def test_places(name: str, dtype: torch.dtype) -> None:
    close(places(dtype).pairs[name])


@DTYPES
@pytest.mark.parametrize("name", LAYER_CASES)
def test_layers(name: str, dtype: torch.dtype) -> None:
    # The converters round more often than PyTorch. In fp32 they round the product before the bias. In bf16 they round
    # the difference from max, and the logarithm before max is added: three roundings of 2^-9 of values below 8.
    rounded = {
        (torch.float32, "linear with bias"): (1e-6, 1e-6),
        (torch.float32, "log of a sum"): (1e-6, 1e-6),
        (torch.bfloat16, "log of a sum"): (0.0, 3 * 8 * 2**-9),
    }
    close(layers(dtype).pairs[name], rounded.get((dtype, name), EXACT))


# The rest is built by hand: operators and attributes that no converter makes of what we trace.


def call(type_: str, attributes: dict[str, Any] | None = None, outputs: int = 1, **operands: Any) -> Any:
    """One node on its own; operands by name, a list for a dynamic one, numbers as int64 constants."""
    flat: dict[str, Tensor | None] = {}
    for name, value in operands.items():
        if isinstance(value, tuple):
            flat |= {f"{name}{i}": x for i, x in enumerate(value)}
        else:
            flat[name] = value if value is None or isinstance(value, Tensor) else torch.tensor(value)
    edges = tuple(None if x is None else Edge(name, 0) for name, x in flat.items())
    described = tuple(Declared(name, None, None) for name in flat)
    node = Node("here", type_, edges, attributes or {}, described, (Declared("y", None, None),) * outputs)
    found = BoundNode.of(node)(list(flat.values()))
    return found[0] if outputs == 1 else found


def same(have: Tensor, want: Any) -> None:
    want = want if isinstance(want, Tensor) else torch.tensor(want)
    assert have.dtype == want.dtype and torch.equal(have, want), (have, want)


def test_attributes_of_exponential_and_logarithm() -> None:
    x = torch.tensor([0.5, 2.0])
    # fp32 of a chain of four operations: a few units in the last place.
    torch.testing.assert_close(call("Exp", {"base": 2.0, "scale": 3.0, "shift": 1.0}, x=x), 2 ** (3 * x + 1))
    torch.testing.assert_close(call("Log", {"base": 10.0, "scale": 3.0, "shift": 1.0}, x=x), (3 * x + 1).log10())
    torch.testing.assert_close(call("Swish", {"scale": 2.0}, x=x), x * torch.sigmoid(2 * x))


def test_division_of_floats_alone() -> None:
    same(call("Div", x1=torch.tensor([3.0]), x2=torch.tensor([2.0])), [1.5])
    with pytest.raises(LoweringError, match=r"node here \(Div\): operands are int64, int64; expected one type of"):
        call("Div", x1=3, x2=2)


def test_promotion_is_that_of_the_definition() -> None:
    half, full = torch.ones(2).half(), torch.ones(2)
    assert call("Mul", x1=half, x2=full).dtype == torch.float32
    with pytest.raises(LoweringError, match=r"\(Add\): operands are float16, float32"):
        call("Add", x1=half, x2=full)


def test_reductions_over_several_axes() -> None:
    x = torch.arange(24.0).reshape(2, 3, 4)
    same(call("ReduceMax", {"keep_dims": True}, x=x, axes=[0, -1]), [[[15.0], [19.0], [23.0]]])
    same(call("ReduceSum", {}, x=x, axes=[0, 1]), [60.0, 66.0, 72.0, 78.0])
    same(call("ReduceAll", {}, x=x > 3, axes=[1, 2]), [False, True])
    with pytest.raises(LoweringError, match=r"\(ReduceSum\): operand axes is empty"):
        call("ReduceSum", {}, x=x, axes=torch.empty(0, dtype=torch.int64))


def test_log_sum_exp_rounds_once() -> None:
    # The exponentials sum to nearly 1, so that a rounding of one of them to bf16 would be most of the logarithm.
    x = torch.tensor([-1.2, -0.36]).bfloat16()
    same(call("ReduceLogSumExp", {}, x=x, axes=[0]), x.double().exp().sum().log().bfloat16())


def test_first_of_equal_values_wins() -> None:
    x = torch.tensor([[1.0, 3.0, 3.0, 0.0, 0.0]])
    same(call("ArgMaxV2", {"dtype": 3}, x=x, dimension=1), torch.tensor([1]).int())


def test_ranks_are_int32() -> None:
    x = torch.tensor([3, 9, 4])
    values, indices = call("TopKV2", {"largest": False}, 2, x=x, k=2)
    same(values, [3, 4])
    same(indices, torch.tensor([0, 2]).int())
    values, indices = call("Sort", {"descending": True, "stable": True}, 2, x=torch.tensor([1.0, 2.0, 1.0, 2.0]))
    same(values, [2.0, 2.0, 1.0, 1.0])
    same(indices, torch.tensor([1, 3, 0, 2]).int())


def test_joins_and_splits() -> None:
    x = torch.arange(12).reshape(2, 6)
    same(call("ConcatD", {"concat_dim": 1, "N": 2}, x=(x, x)), torch.cat((x, x), 1))
    sizes = [1, -1, 2]
    parts = call("SplitV", {"num_split": 3}, 3, x=x, size_splits=sizes, split_dim=1)
    for have, want in zip(parts, x.split((1, 3, 2), 1), strict=True):
        same(have, want)
    rows = call("Unpack", {"num": 2, "axis": 0}, 2, x=x[:2])
    assert all(torch.equal(row, x[i]) for i, row in enumerate(rows))
    with pytest.raises(LoweringError, match=r"\(ConcatV2D\): attribute N = 3; the interpreter covers 2"):
        call("ConcatV2D", {"N": 3, "concat_dim": 0}, x=(x, x))


def test_shapes_and_ranks() -> None:
    x = torch.arange(6).reshape(1, 2, 1, 3)
    same(call("Shape", {"dtype": 3}, x=x), torch.tensor([1, 2, 1, 3]).int())
    same(call("Shape", {"dtype": 9}, x=x), [1, 2, 1, 3])
    assert call("Squeeze", {"axis": []}, x=x).shape == (2, 3)
    assert call("Squeeze", {"axis": [-2]}, x=x).shape == (1, 2, 3)
    assert call("Unsqueeze", {"axes": [2, 0]}, x=x[0, :, 0]).shape == (1, 2, 1, 3)
    with pytest.raises(LoweringError, match=r"\(Squeeze\): attribute axis = \[1\]"):
        call("Squeeze", {"axis": [1]}, x=x)
    with pytest.raises(LoweringError, match=r"\(Reshape\): attribute axis = 1; the interpreter covers 0"):
        call("Reshape", {"axis": 1}, x=x, shape=[6])
    with pytest.raises(LoweringError, match=r"\(Reshape\): shape '\[4\]' is invalid for input of size 6"):
        call("Reshape", x=x, shape=[4])
    with pytest.raises(LoweringError, match=r"\(Tile\): operand multiples has 1 values, expected 4"):
        call("Tile", x=x, multiples=[2])


def test_indices() -> None:
    x = torch.arange(6).reshape(3, 2)
    same(call("GatherV2", {"negative_index_support": True}, x=x, indices=[-1, 0], axis=[0]), [[4, 5], [0, 1]])
    for type_, attributes in (("GatherV2", {}), ("GatherV2", {"negative_index_support": True})):
        with pytest.raises(LoweringError, match="out of range"):
            call(type_, attributes, x=x, indices=[3], axis=0)
    with pytest.raises(LoweringError, match="out of range"):  # without support a negative index is outside
        call("GatherV2", x=x, indices=[-1], axis=0)
    with pytest.raises(LoweringError, match=r"\(GatherV2\): attribute batch_dims = 1; the interpreter covers 0"):
        call("GatherV2", {"batch_dims": 1}, x=x, indices=[0], axis=1)
    with pytest.raises(LoweringError, match="operand axis has 2 values, expected 1"):
        call("GatherV2", x=x, indices=[0], axis=[0, 1])


def test_writes_go_into_the_first_operand() -> None:
    var, rows = torch.zeros(4, 2), torch.ones(1, 2)
    assert call("ScatterNdUpdate", {}, var=var, indices=[[2]], updates=rows) is var
    same(var, [[0.0, 0.0], [0.0, 0.0], [1.0, 1.0], [0.0, 0.0]])
    with pytest.raises(LoweringError, match="out of"):
        call("ScatterNdUpdate", {}, var=var, indices=[[4]], updates=rows)


def test_matrices_can_be_transposed() -> None:
    a, b, bias = random(3, 4), random(5, 3, seed=1), random(5, seed=2)
    flags = {"transpose_x1": True, "transpose_x2": True}
    same(call("MatMul", flags, x1=a, x2=b, bias=None), a.t() @ b.t())
    same(call("MatMulV2", flags, x1=a, x2=b, bias=bias, offset_w=None), torch.addmm(bias, a.t(), b.t()))
    flags = {"adj_x1": True, "adj_x2": True}
    a, b = random(2, 1, 3, 4), random(6, 5, 3, seed=1)
    for type_ in ("BatchMatMul", "BatchMatMulV2"):
        same(call(type_, flags, x1=a, x2=b), a.mT @ b.mT)
    with pytest.raises(LoweringError, match="operands have 4 and 3 dimensions, expected 2 each"):
        call("MatMul", {}, x1=a, x2=b)
    with pytest.raises(LoweringError, match=r"\(MatMulV2\): attribute offset_x = 1"):
        call("MatMulV2", {"offset_x": 1}, x1=a, x2=b)
    with pytest.raises(LoweringError, match=r"\(MatMulV2\): operand offset_w is not known"):
        call("MatMulV2", {}, x1=a, x2=b, offset_w=b)


def test_softmax_in_fp32_of_fp16() -> None:
    x = random(2, 4, dtype=torch.float16)
    same(call("SoftmaxV2", {"axes": [0], "half_to_float": True}, x=x), x.float().softmax(0))
    with pytest.raises(LoweringError, match=r"attribute axes = \[0, 1\]; the interpreter covers one axis"):
        call("SoftmaxV2", {"axes": [0, 1]}, x=x)


@pytest.mark.parametrize("mask_shape", [(5, 12), (1, 6, 20), (3, 5, 12), (1, 1, 5, 12), (3, 1, 8, 16)])
@pytest.mark.parametrize("layout", ["BNSD", "BSND", "BSH"])
def test_attention_in_every_layout(layout: str, mask_shape: tuple[int, ...]) -> None:
    q, k, v = (random(3, n, t, 8, seed=t) for n, t in ((4, 5), (2, 12), (2, 12)))
    masked = whole(*mask_shape, high=2).to(torch.int8)
    rows = masked.reshape(-1, 1, *mask_shape[-2:]).bool().expand(3, 1, *mask_shape[-2:])
    one_by_one = [eager_attention(q[[b]], k[[b]], v[[b]], rows[[b]], 0.3) for b in range(3)]
    want, laid = torch.cat(one_by_one), [q, k, v]
    if layout != "BNSD":
        laid, want = [x.transpose(1, 2) for x in laid], want.transpose(1, 2)
    if layout == "BSH":
        laid, want = [x.flatten(2) for x in laid], want.flatten(2)
    attributes = {"num_heads": 4, "num_key_value_heads": 2, "scale": 0.3, "input_layout": layout, "sparse_mode": 1}
    out, lse = call(
        "FusedInferAttentionScore", attributes, 2, query=laid[0], key=(laid[1],), value=(laid[2],), atten_mask=masked
    )
    same(out, want)
    assert lse.numel() == 0


@pytest.mark.parametrize(
    ("attributes", "match"),
    [
        ({"sparse_mode": 9}, r"attribute sparse_mode = 9; the interpreter covers 0 or 1"),
        ({"input_layout": "TND"}, r"attribute input_layout = 'TND'"),
        ({"pre_tokens": 4}, r"attribute pre_tokens = 4"),
        ({"softmax_lse_flag": True}, r"attribute softmax_lse_flag = True"),
        ({"block_size": 128}, r"attribute block_size = 128"),
        ({"num_heads": 2}, r"operand is \[1, 4, 5, 8\] in layout BNSD; expected 4 dimensions and 2 heads"),
        ({"sink": 1}, r"attribute sink = 1 is not known"),
    ],
)
def test_attention_refuses_what_it_does_not_cover(attributes: dict, match: str) -> None:
    q, k = random(1, 4, 5, 8), random(1, 2, 12, 8)
    attributes = {"num_heads": 4, "num_key_value_heads": 2, "input_layout": "BNSD"} | attributes
    with pytest.raises(LoweringError, match=match):
        call("FusedInferAttentionScore", attributes, 2, query=q, key=(k,), value=(k,))


@pytest.mark.parametrize(
    ("operands", "match"),
    [
        ({"atten_mask": torch.zeros(5, 11, dtype=torch.bool)}, r"atten_mask is \[5, 11\]; expected 5 rows of 12"),
        ({"atten_mask": torch.zeros(2, 5, 12, dtype=torch.bool)}, r"atten_mask is \[2, 5, 12\]; expected \[T, C\]"),
        ({"atten_mask": torch.zeros(1, 4, 5, 12, dtype=torch.bool)}, r"atten_mask is \[1, 4, 5, 12\]"),
        ({"atten_mask": torch.zeros(5, 12)}, r"operands are float32; expected one type of bool, int8, uint8"),
        ({"block_table": torch.zeros(1, 1)}, r"operand block_table is not known"),
    ],
)
def test_attention_refuses_operands(operands: dict, match: str) -> None:
    q, k = random(1, 4, 5, 8), random(1, 2, 12, 8)
    attributes = {"num_heads": 4, "num_key_value_heads": 2, "input_layout": "BNSD"}
    with pytest.raises(LoweringError, match=match):
        call("FusedInferAttentionScore", attributes, 2, query=q, key=(k,), value=(k,), **operands)


def test_other_attributes_out_of_range() -> None:
    x = torch.ones(2)
    for type_, attributes, operands in (
        ("Cast", {"dst_type": 11}, {"x": x}),
        ("Shape", {"dtype": 0}, {"x": x}),
        ("ArgMaxV2", {"dtype": 0}, {"x": x, "dimension": 0}),
        ("TopKV2", {"sort_policy": 1}, {"x": x, "k": 1}),
        ("ScatterNdUpdate", {"use_locking": True}, {"var": x, "indices": [[0]], "updates": x[:1]}),
        ("RotaryMul", {"rotary_mode": "interleave"}, {"x": x, "r1": x, "r2": x}),
        ("Exp", {"base": -2.0}, {"x": x}),
        ("GroupedMatmul", {"group_type": 2, **GROUPS}, {"x": (x,), "weight": (x,), "group_list": [2]}),
        ("MoeInitRoutingV3", {"active_num": 3, "active_expert_range": [0, 2]}, {"x": x, "expert_idx": EXPERTS}),
        ("MoeFinalizeRoutingV2", {"drop_pad_mode": 0}, {"expanded_x": x, "expanded_row_idx": x, "scales": x}),
    ):
        name, value = next(iter(attributes.items()))
        with pytest.raises(LoweringError, match=rf"\({type_}\): attribute {name} = {value!r}"):
            call(type_, attributes, **operands)


@pytest.mark.parametrize(
    ("type_", "attributes", "operands", "match"),
    [
        ("MoeGatingTopKSoftmax", {"k": 1}, {"finished": torch.ones(2).bool()}, "finished is not covered"),
        ("MoeInitRoutingV3", {"active_expert_range": [0, 2]}, {"expert_idx": EXPERTS, "scale": EXPERTS}, "scale and"),
        ("GroupedMatmul", {}, {"weight": (EXPERTS,)}, "one weight and a group_list"),
        ("GroupedMatmul", {}, {"weight": (EXPERTS,), "bias": (torch.ones(2),)}, "operand bias has values"),
        ("MoeFinalizeRoutingV2", {"drop_pad_mode": 2}, {"expanded_row_idx": EXPERTS}, "covers scales alone"),
    ],
)
def test_experts_refuse_what_they_do_not_cover(type_: str, attributes: dict, operands: dict, match: str) -> None:
    x = torch.ones(2, 2)
    first = {"GroupedMatmul": {"x": (x,)}, "MoeFinalizeRoutingV2": {"expanded_x": x}}.get(type_, {"x": x})
    with pytest.raises(LoweringError, match=match):
        call(type_, attributes, **first, **operands)


def test_unknown_names() -> None:
    x = torch.ones(2)
    with pytest.raises(LoweringError, match="node here: operator Roll is not known"):
        call("Roll", x=x)
    with pytest.raises(LoweringError, match=r"node here \(Add\): attribute alpha = 2.0 is not known"):
        call("Add", {"alpha": 2.0}, x1=x, x2=x)
    with pytest.raises(LoweringError, match=r"node here \(Add\): operand x3 is not known"):
        call("Add", x1=x, x2=x, x3=x)
    with pytest.raises(LoweringError, match=r"node here \(Add\): operand x2 is missing"):
        call("Add", x1=x)
    call("Add", {"_note": 1}, x1=x, x2=x)  # a note of torchair, not an attribute of the operator


def test_meta_values_take_the_others_along() -> None:
    real, meta = torch.arange(4), torch.empty(4, dtype=torch.int64, device="meta")
    total = call("Add", x1=real, x2=meta)
    assert total.is_meta and total.shape == (4,)
    assert call("GatherV2", x=meta, indices=real, axis=0).is_meta
    same(call("Shape", {}, x=meta), torch.tensor([4]).int())
    with pytest.raises(LoweringError, match=r"\(Reshape\): operand shape is read on the host, but"):
        call("Reshape", x=real, shape=meta)


def test_every_operator_of_the_table_is_tested() -> None:
    by_hand = "BatchMatMulV2 ConcatD Div Shape Unpack ZerosLike"
    by_hand += " DynamicQuant QuantBatchMatmulV3 AddRmsNormDynamicQuant DequantSwigluQuant"  # in test_quantised.py
    by_hand += " HcomAllGather HcomAllReduce"  # in test_lockstep.py
    by_hand += " WeightQuantBatchMatmulV2"  # in test_int4.py
    families = [family(dtype) for family in (floats, places, layers) for dtype in (torch.float32, torch.bfloat16)]
    tested = set(by_hand.split()).union(integers().types, *(family.types for family in families))
    assert OPERATORS.keys() - tested == set()
