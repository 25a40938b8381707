"""Every form of every operator against a formula written here, and the forms against each other."""

import inspect
from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest
import torch
from onnxruntime import InferenceSession, OrtValue
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from draftwood.kernels import (
    COMPOSED_CONTRACTS,
    CPU_CONTRACTS,
    NPU_CONTRACTS,
    Contract,
    eager_attention,
    onnx_forms,
)
from draftwood.kernels.experts import GROUPED_LINEAR
from draftwood.tests.exported import onnx_graph, opened

# T rows, H features, N query heads, K key/value heads, D head dimension, C cache slots, S seen slots

CONTRACTS = {contract.name: contract for contract in NPU_CONTRACTS + CPU_CONTRACTS + COMPOSED_CONTRACTS}
OPERATORS = {name: contract.operator for name, contract in CONTRACTS.items()}

# The formulas below are float64. The operators are fp32 (unit roundoff 6e-8) over sums of at most 24 terms of order 1.
# Measured: 2e-6 at most (swiglu, whose products reach 60).
FORMULA = {"rtol": 0.0, "atol": 1e-5}
# Two fp32 programs that add in another order and take another exp; measured 2e-6 at most.
RUNTIME = {"rtol": 0.0, "atol": 1e-5}


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def tree_mask(rows: int, slots: int, committed: int) -> Tensor:
    """True = masked: `committed` slots of text, then a star of rows that see the root and themselves."""
    masked = torch.ones(1, 1, rows, slots, dtype=torch.bool)
    masked[..., : committed + 1] = False
    masked[0, 0, torch.arange(rows), committed + torch.arange(rows)] = False
    return masked


def attention_arguments(rows: int = 3, slots: int = 10, wide: int = 0) -> tuple[tuple, dict]:
    query = noise(rows, 4, 8).transpose(0, 1)[None]  # as the decoder gives it: not contiguous
    options = {"num_heads": 4, "num_key_value_heads": 2, "scale": 0.3, "input_layout": "BNSD"}
    mask = torch.ones(1, 1, rows + wide, slots + wide, dtype=torch.bool)
    mask[..., :rows, :slots] = tree_mask(rows, slots, 4)
    arguments = (query, noise(1, 2, slots, 8, seed=1), noise(1, 2, slots, 8, seed=2))
    return arguments, {**options, "sparse_mode": 1, "atten_mask": mask}


def append_arguments(rows: int = 3, seen: int = 7, slots: int = 16) -> tuple[tuple, dict]:
    """Rows after seen - rows slots of text; every row but the first two is hidden from the later ones."""
    bias = torch.zeros(1, 1, rows, seen)
    for row in range(rows):
        bias[0, 0, row, seen - rows + 2 : seen - rows + row] = -1e38
    caches = noise(1, 2, slots, 8, seed=3), noise(1, 2, slots, 8, seed=4)
    new = noise(1, rows, 32), noise(1, rows, 16, seed=1), noise(1, rows, 16, seed=2)
    last, total = torch.tensor([seen - 1], dtype=torch.int32), torch.tensor(seen, dtype=torch.int32)
    return (*new, *caches, bias, last, total, 4, 2, 0.3), {}


def block_arguments(rows: int = 3) -> tuple[tuple, dict]:
    """Rows after a settled block and ten tokens of an open one; test_block_attention.py has other cases."""
    bias = torch.full((rows, 64), -1e38)
    bias[:, :11] = 0
    bias[torch.arange(rows), 10 + torch.arange(rows)] = 0
    caches = [noise(1, 2, 64, 8, seed=seed) for seed in range(1, 5)]
    home = (bias == 0).float().view(1, 1, 1, rows, 64)
    doubled = torch.full((1, 1), 2.0), torch.full((1, 2), 2.0)
    return (noise(1, rows, 32), *caches, bias, home, *doubled, torch.zeros(1), 4, 0.3), {}


def rows_arguments(rows: int = 3) -> tuple[tuple, dict]:
    angles = noise(rows, 4, seed=1)
    return (noise(1, rows, 32), angles.cos(), angles.sin(), 4), {}


def scatter_arguments() -> tuple[tuple, dict]:
    return (noise(12, 8), torch.tensor([[3], [7], [0]]), noise(3, 8, seed=1)), {}


CHOSEN = torch.tensor([[4, 1], [1, 0], [4, 2]], dtype=torch.int32)  # nobody chooses expert 3


def experts_arguments() -> tuple[tuple, dict]:
    return (noise(3, 8), CHOSEN, noise(3, 2, seed=1).abs(), noise(5, 12, 8, seed=2), noise(5, 8, 6, seed=3)), {}


def routing_arguments() -> tuple[tuple, dict]:
    options = {"active_num": 6, "expert_num": 5, "expert_tokens_num_type": 1, "expert_tokens_num_flag": True}
    return (noise(3, 8), CHOSEN), {**options, "active_expert_range": [0, 5]}


def finalize_arguments() -> tuple[tuple, dict]:
    places = torch.tensor([5, 2, 3, 0, 4, 1], dtype=torch.int32)
    return (noise(6, 8), None, None, None, noise(3, 2, seed=1), places, None, 2), {}


ARGUMENTS: dict[str, Callable[[], tuple[tuple, dict]]] = {
    "npu_rms_norm": lambda: ((noise(3, 24), noise(24, seed=1), 1e-5), {}),
    "npu_add_rms_norm": lambda: ((noise(3, 24), noise(3, 24, seed=2), noise(24, seed=1), 1e-5), {}),
    "npu_rotary_mul": lambda: ((noise(3, 4, 8), noise(3, 1, 8, seed=1), noise(3, 1, 8, seed=2)), {}),
    "npu_swiglu": lambda: ((noise(3, 24) * 4,), {}),
    "npu_fused_infer_attention_score": attention_arguments,
    "npu_scatter_nd_update": scatter_arguments,
    "npu_scatter_nd_update_": scatter_arguments,
    "rotary_rows": rows_arguments,
    "append_attention": append_arguments,
    "block_attention": block_arguments,
    "npu_moe_gating_top_k_softmax": lambda: ((noise(3, 5), None, 2), {}),
    "npu_moe_init_routing_v2": routing_arguments,
    "npu_moe_finalize_routing": finalize_arguments,
    "experts": experts_arguments,
    "npu_add_rms_norm_dynamic_quant": lambda: ((noise(3, 24), noise(3, 24, seed=2), noise(24, seed=1)), {}),
    "npu_dequant_swiglu_quant": lambda: ((noise(3, 24),), {"activate_left": True, "quant_mode": 1}),
}
MUTATING = {"npu_scatter_nd_update_"}
# The NPU's forms of ``experts`` and of quantised layers.
ROUNDING = {"npu_add_rms_norm_dynamic_quant", "npu_dequant_swiglu_quant"}
NPU_ALONE = {"npu_moe_init_routing_v2", "npu_moe_finalize_routing"} | ROUNDING
IN_ONNX = sorted(ARGUMENTS.keys() - MUTATING - NPU_ALONE)


def call(name: str, arguments: tuple[tuple, dict]) -> list[Tensor]:
    result = OPERATORS[name](*arguments[0], **arguments[1])
    return [result] if isinstance(result, Tensor) else list(result)


def in_dtype(arguments: tuple[tuple, dict], dtype: torch.dtype) -> tuple[tuple, dict]:
    def cast(value: object) -> object:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    return tuple(map(cast, arguments[0])), {key: cast(value) for key, value in arguments[1].items()}


# The formulas, one row and one head at a time, in float64.


def rms_norm(x: np.ndarray, gamma: np.ndarray, epsilon: float) -> np.ndarray:
    return np.array([row / np.sqrt(np.sum(row * row) / len(row) + epsilon) * gamma for row in x])


def rotated(pair: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    half, out = len(pair) // 2, np.zeros_like(pair)
    for i in range(half):
        out[i] = pair[i] * cos[i] - pair[i + half] * sin[i]
        out[i + half] = pair[i + half] * cos[i + half] + pair[i] * sin[i + half]
    return out


def attended(query: np.ndarray, keys: np.ndarray, values: np.ndarray, scale: float) -> np.ndarray:
    """One query [D] over the visible keys and values [S, D]; no key gives zeros."""
    weights = np.exp([scale * float(query @ key) for key in keys])
    return sum((w * v for w, v in zip(weights / max(weights.sum(), 1e-300), values, strict=True)), 0 * query)


def doubles(*tensors: Tensor) -> list[np.ndarray]:
    return [tensor.double().numpy() for tensor in tensors]


def assert_close(got: object, wanted: object, tolerance: dict[str, float]) -> None:
    np.testing.assert_allclose(np.asarray(got), np.asarray(wanted), **tolerance)


def test_every_contract_has_arguments() -> None:
    # In test_nbits, test_rows_attention and compiler/ge/test_int4.
    elsewhere = {"nbits_linear", "rows_attention", "npu_weight_quant_batchmatmul"}
    assert ARGUMENTS.keys() | elsewhere == CONTRACTS.keys()
    table = onnx_forms(cpu=True)
    assert {n for n, operator in OPERATORS.items() if operator in table} == {*IN_ONNX, "nbits_linear", "rows_attention"}
    assert {OPERATORS[c.name] for c in CPU_CONTRACTS} & onnx_forms(cpu=False).keys() == {OPERATORS["nbits_linear"]}


def test_rms_norm() -> None:
    arguments = ARGUMENTS["npu_rms_norm"]()
    y, rstd = call("npu_rms_norm", arguments)
    x, gamma = doubles(*arguments[0][:2])
    assert_close(y, rms_norm(x, gamma, 1e-5), FORMULA)
    assert_close(rstd[:, 0], [1 / np.sqrt(np.mean(row**2) + 1e-5) for row in x], FORMULA)


def test_add_rms_norm() -> None:
    arguments = ARGUMENTS["npu_add_rms_norm"]()
    y, _, total = call("npu_add_rms_norm", arguments)
    x1, x2, gamma = doubles(*arguments[0][:3])
    assert_close(total, x1 + x2, FORMULA)
    assert_close(y, rms_norm(x1 + x2, gamma, 1e-5), FORMULA)


def test_norm_statistics_are_fp32_whatever_the_input() -> None:
    # 300 is exact in bf16 and fp16, but its square overflows fp16.
    y, rstd = torch.ops.npu.npu_rms_norm(torch.full((1, 8), 300.0, dtype=torch.float16), torch.ones(8).half())
    assert rstd.dtype == torch.float32 and y.dtype == torch.float16
    assert y.tolist() == [[1.0] * 8]


def test_rotary_mul() -> None:
    arguments = ARGUMENTS["npu_rotary_mul"]()
    (out,) = call("npu_rotary_mul", arguments)
    x, cos, sin = doubles(*arguments[0])
    wanted = [[rotated(x[t, n], cos[t, 0], sin[t, 0]) for n in range(4)] for t in range(3)]
    assert_close(out, wanted, FORMULA)


def test_rotary_rows() -> None:
    arguments = rows_arguments()
    (out,) = call("rotary_rows", arguments)
    x, cos, sin = doubles(*arguments[0][:3])
    for t in range(3):
        for n in range(4):
            both = [np.concatenate((table[t], table[t])) for table in (cos, sin)]
            assert_close(out[0, t, 8 * n : 8 * n + 8], rotated(x[0, t, 8 * n : 8 * n + 8], *both), FORMULA)


@pytest.mark.parametrize("dim", [-1, 0])
def test_swiglu(dim: int) -> None:
    x = noise(4, 24) * 4
    out = torch.ops.npu.npu_swiglu(x, dim)
    gate, up = np.split(x.double().numpy(), 2, dim)
    assert_close(out, gate / (1 + np.exp(-gate)) * up, FORMULA)


@pytest.mark.parametrize("twin", ["npu_scatter_nd_update", "npu_scatter_nd_update_"])
def test_scatter_nd_update(twin: str) -> None:
    cache, index, rows = scatter_arguments()[0]
    before = cache.clone()
    out = OPERATORS[twin](cache, index, rows)
    wanted = before.numpy().copy()
    for at, row in zip(index[:, 0].tolist(), rows.numpy(), strict=True):
        wanted[at] = row
    assert np.array_equal(out, wanted)
    assert torch.equal(cache, out if twin in MUTATING else before)


@pytest.mark.parametrize("kv_heads", [1, 2, 4], ids="kv_heads={}".format)
def test_attention(kv_heads: int) -> None:
    query, key, value = (
        noise(1, 4, 3, 8),
        noise(1, kv_heads, 10, 8, seed=1),
        noise(1, kv_heads, 10, 8, seed=2),
    )
    masked = tree_mask(3, 10, 4)
    out = eager_attention(query, key, value, masked, 0.3)[0]
    q, k, v = (array[0] for array in doubles(query, key, value))
    for head in range(4):
        for row in range(3):
            seen, group = ~masked[0, 0, row].numpy(), head * kv_heads // 4
            assert_close(out[head, row], attended(q[head, row], k[group][seen], v[group][seen], 0.3), FORMULA)


def test_attention_without_a_mask_sees_everything() -> None:
    (query, key, value), options = attention_arguments()
    options = {**options, "atten_mask": torch.zeros(1, 1, 3, 10, dtype=torch.bool)}
    masked = call("npu_fused_infer_attention_score", ((query, key, value), options))[0]
    options["atten_mask"] = None
    assert_close(call("npu_fused_infer_attention_score", ((query, key, value), options))[0], masked, FORMULA)


def test_gating() -> None:
    scores = noise(3, 5)
    shares, ids, order = call("npu_moe_gating_top_k_softmax", ((scores, None, 2), {}))
    for row, x in enumerate(scores.double().numpy()):
        best = np.argsort(-x)[:2]
        assert ids[row].tolist() == best.tolist() and order[row].tolist() == [row, row + 3]
        assert_close(shares[row], np.exp(x[best]) / np.exp(x).sum(), FORMULA)


def test_rows_are_routed_to_their_experts() -> None:
    (x, ids), options = routing_arguments()
    rows, places, counts, _ = call("npu_moe_init_routing_v2", ((x, ids), options))
    assert counts.tolist() == [1, 2, 1, 0, 2]
    for t, chosen in enumerate(ids.tolist()):
        for j, expert in enumerate(chosen):
            place = int(places[2 * t + j])
            assert torch.equal(rows[place], x[t]) and sum(counts[:expert]) <= place < sum(counts[: expert + 1])


def test_rows_come_back_with_their_shares() -> None:
    arguments = finalize_arguments()
    rows, shares = doubles(arguments[0][0], arguments[0][4])
    places = arguments[0][5].tolist()
    wanted = [sum(shares[t, j] * rows[places[2 * t + j]] for j in range(2)) for t in range(3)]
    assert_close(call("npu_moe_finalize_routing", arguments)[0], wanted, FORMULA)


def test_experts() -> None:
    arguments = experts_arguments()
    x, shares, gate_up, down = doubles(*(arguments[0][i] for i in (0, 2, 3, 4)))
    for t, chosen in enumerate(CHOSEN.tolist()):
        wanted = np.zeros(8)
        for share, expert in zip(shares[t], chosen, strict=True):
            gate, up = np.split(gate_up[expert] @ x[t], 2)
            wanted += share * (down[expert] @ (gate / (1 + np.exp(-gate)) * up))
        assert_close(call("experts", arguments)[0][t], wanted, FORMULA)


def test_grouped_products_are_those_of_every_group() -> None:
    x, weight, counts = noise(6, 8), noise(4, 3, 8, seed=1), torch.tensor([2, 0, 3, 1])
    out = GROUPED_LINEAR.operator(x, weight, counts)
    experts = [0, 0, 2, 2, 2, 3]
    assert_close(out, [w @ row for row, w in zip(doubles(x)[0], doubles(weight)[0][experts], strict=True)], FORMULA)


def test_fully_masked_row_gives_zeros() -> None:
    arguments = attention_arguments()
    seen = call("npu_fused_infer_attention_score", arguments)[0]
    arguments[1]["atten_mask"][0, 0, 1] = True
    out = call("npu_fused_infer_attention_score", arguments)[0]
    assert not out[:, :, 1].any() and seen[:, :, 1].all()
    assert torch.equal(out[:, :, [0, 2]], seen[:, :, [0, 2]])


def test_mask_may_be_larger_than_rows_and_slots() -> None:
    exact = call("npu_fused_infer_attention_score", attention_arguments())[0]
    assert torch.equal(call("npu_fused_infer_attention_score", attention_arguments(wide=6))[0], exact)


@pytest.mark.parametrize(
    "odd",
    [
        {"input_layout": "BSH"},
        {"sparse_mode": 2},
        {"sparse_mode": 9},
        {"next_tokens": 0},
        {"pse_shift": torch.zeros(1)},
        {"actual_seq_lengths_kv": [4]},
        {"block_size": 128},
        {"softmax_lse_flag": True},
        {"num_heads": 8},
        {"num_key_value_heads": 0},
        {"num_key_value_heads": 1},
    ],
    ids=lambda odd: "{}={}".format(*next(iter(odd.items()))).partition("(")[0],
)
def test_attention_refuses_what_it_does_not_compute(odd: dict) -> None:
    arguments, options = attention_arguments()
    with pytest.raises(NotImplementedError, match="fused attention"):
        call("npu_fused_infer_attention_score", (arguments, {**options, **odd}))


def test_attention_of_two_texts_is_that_of_each() -> None:
    """Each by its own mask."""
    arguments, options = attention_arguments()
    other = tuple(tensor.flip(-2) for tensor in arguments)
    masked = options["atten_mask"]
    both = torch.ops.npu.npu_fused_infer_attention_score(
        *(torch.cat(pair) for pair in zip(arguments, other, strict=True)),
        **options | {"atten_mask": torch.cat((masked, masked.flip(-1)))},
    )[0]
    alone = [
        torch.ops.npu.npu_fused_infer_attention_score(*given, **options | {"atten_mask": mask})[0]
        for given, mask in ((arguments, masked), (other, masked.flip(-1)))
    ]
    assert torch.equal(both, torch.cat(alone)) and not torch.equal(*alone)


def test_attention_refuses_texts_without_keys() -> None:
    (query, *cache), options = attention_arguments()
    with pytest.raises(NotImplementedError, match="of 2 and 1 texts"):
        torch.ops.npu.npu_fused_infer_attention_score(torch.cat((query, query)), *cache, **options)


@pytest.mark.parametrize(("rows", "seen"), [(1, 1), (1, 7), (3, 3), (4, 12), (5, 16)])
def test_append_attention(rows: int, seen: int) -> None:
    arguments = append_arguments(rows, seen)[0]
    out, keys, values = call("append_attention", (arguments, {}))
    caches = [arguments[3].clone(), arguments[4].clone()]
    for cache, new in zip(caches, arguments[1:3], strict=True):
        for row in range(rows):
            for head in range(2):
                cache[0, head, seen - rows + row] = new[0, row, 8 * head : 8 * head + 8]
    assert torch.equal(keys, caches[0]) and torch.equal(values, caches[1])
    q, k, v, bias = doubles(arguments[0], keys, values, arguments[5])
    for row in range(rows):
        visible = (bias[0, 0, row] == 0) & (np.arange(seen) <= seen - rows + row)
        for head in range(4):
            k_SD, v_SD = (side[0, head // 2, :seen][visible] for side in (k, v))
            at = slice(8 * head, 8 * head + 8)
            assert_close(out[0, row, at], attended(q[0, row, at], k_SD, v_SD, 0.3), FORMULA)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("npu_rotary_mul", (noise(2, 1, 8), noise(2, 1, 8), noise(2, 1, 8), "interleave")),
        ("npu_rotary_mul", (noise(2, 1, 8), noise(2, 1, 8), noise(2, 1, 8), "half", noise(8, 8))),
        ("npu_moe_gating_top_k_softmax", (noise(3, 5), torch.ones(3).bool(), 2)),
        ("npu_moe_finalize_routing", (*finalize_arguments()[0][:7], 0)),
    ],
    ids=["interleaved rotary", "rotate matrix", "finished rows", "places by columns"],
)
def test_other_modes_are_refused(name: str, arguments: tuple) -> None:
    with pytest.raises(NotImplementedError):
        call(name, (arguments, {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", sorted(ARGUMENTS))
def test_fake_is_shaped_like_the_reference(name: str, dtype: torch.dtype) -> None:
    arguments = in_dtype(ARGUMENTS[name](), dtype)
    real = call(name, arguments)
    with FakeTensorMode() as mode:
        fake_arguments = torch.utils._pytree.tree_map_only(Tensor, mode.from_tensor, in_dtype(ARGUMENTS[name](), dtype))
        fake = call(name, fake_arguments)

    def described(tensor: Tensor) -> tuple:
        return tuple(tensor.shape), tensor.dtype, tensor.stride()

    assert list(map(described, fake)) == list(map(described, real))


@pytest.mark.parametrize("name", sorted(ARGUMENTS))
def test_opcheck(name: str) -> None:
    # AOT dispatch cannot functionalise an operator that returns its own mutated input; torchair never traces
    # those two, it only asks whether they exist.
    tests = ["test_schema", "test_autograd_registration", "test_faketensor"]
    tests += [] if name in MUTATING else ["test_aot_dispatch_dynamic"]
    arguments, options = ARGUMENTS[name]()
    assert set(torch.library.opcheck(OPERATORS[name], arguments, options, test_utils=tests).values()) == {"SUCCESS"}


class OneOperator(torch.nn.Module):
    """The operator with everything but its tensors bound."""

    def __init__(self, name: str, arguments: tuple[tuple, dict]) -> None:
        super().__init__()
        names = [argument.name for argument in OPERATORS[name]._schema.arguments]
        self.operator = OPERATORS[name]
        bound = {**dict(zip(names, arguments[0], strict=False)), **arguments[1]}
        self.tensors = {key: value for key, value in bound.items() if isinstance(value, Tensor)}
        self.rest = {key: value for key, value in bound.items() if key not in self.tensors}

    def forward(self, *tensors: Tensor) -> object:
        return self.operator(**dict(zip(self.tensors, tensors, strict=True)), **self.rest)


def exported(name: str, arguments: tuple[tuple, dict], dynamic: dict[str, dict] | None = None) -> ir.Model:
    module = OneOperator(name, arguments)
    shapes = tuple((dynamic or {}).get(key) for key in module.tensors)
    program = torch.export.export(
        module, tuple(module.tensors.values()), dynamic_shapes=(shapes,) if dynamic else None, strict=False
    )
    outputs = [f"out{i}" for i in range(len(CONTRACTS[name].operator._schema.returns))]
    return onnx_graph(program, list(module.tensors), outputs, cpu=CONTRACTS[name] in CPU_CONTRACTS)


def onnx_run(session: InferenceSession, name: str, arguments: tuple[tuple, dict]) -> list[np.ndarray]:
    tensors = OneOperator(name, arguments).tensors
    feeds = {node.name: tensors[node.name].contiguous().numpy() for node in session.get_inputs()}
    return session.run(None, feeds)


PORTABLE = {
    **{name: ARGUMENTS[name] for name in IN_ONNX if CONTRACTS[name] not in CPU_CONTRACTS},
    "npu_fused_infer_attention_score/wide": lambda: attention_arguments(wide=6),
    "npu_fused_infer_attention_score/one row": lambda: attention_arguments(rows=1),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", PORTABLE)
def test_onnx_form(case: str) -> None:
    name, arguments = case.partition("/")[0], PORTABLE[case]()
    model = exported(name, arguments)
    assert dict(model.opset_imports) == {"": 18}
    assert {node.domain for node in model.graph} == {""} and not model.functions
    # The second output of attention, its log-sum-exp, is an empty placeholder.
    count = 1 if name == "npu_fused_infer_attention_score" else None
    outputs = onnx_run(opened(model), name, arguments)[:count]
    for got, wanted in zip(outputs, call(name, arguments)[:count], strict=True):
        assert_close(got, wanted, RUNTIME)


@pytest.mark.filterwarnings("ignore")
def test_onnx_form_of_a_fully_masked_row_is_finite() -> None:
    arguments = attention_arguments()
    arguments[1]["atten_mask"][0, 0, 1] = True
    session = opened(exported("npu_fused_infer_attention_score", arguments))
    got = onnx_run(session, "npu_fused_infer_attention_score", arguments)[0]
    wanted = call("npu_fused_infer_attention_score", arguments)[0]
    assert_close(got[:, :, [0, 2]], wanted[:, :, [0, 2]], RUNTIME)
    assert np.isfinite(got).all()


AUTO = torch.export.Dim.AUTO
SYMBOLIC = {
    "rotary_rows": {"x": {1: AUTO}, "cos": {0: AUTO}, "sin": {0: AUTO}},
    "append_attention": {
        **{name: {1: AUTO} for name in ("query", "key", "value")},
        **{name: {2: AUTO} for name in ("key_cache", "value_cache")},
        "bias": {2: AUTO, 3: AUTO},
    },
}


@pytest.fixture(scope="module")
def symbolic() -> dict[str, InferenceSession]:
    return {name: opened(exported(name, ARGUMENTS[name](), sizes)) for name, sizes in SYMBOLIC.items()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("rows", [1, 2, 9])
def test_rotary_rows_in_onnxruntime(symbolic: dict[str, InferenceSession], rows: int) -> None:
    arguments = rows_arguments(rows)
    (got,) = onnx_run(symbolic["rotary_rows"], "rotary_rows", arguments)
    assert_close(got, call("rotary_rows", arguments)[0], RUNTIME)


@pytest.mark.parametrize(
    ("rows", "seen", "slots"),
    [(1, 1, 8), (4, 4, 8), (1, 7, 8), (5, 12, 40), (3, 16, 16)],
    ids=["T=1 on an empty cache", "tree on an empty cache", "T=1", "tree", "up to the last slot"],
)
def test_append_attention_in_onnxruntime(
    symbolic: dict[str, InferenceSession], rows: int, seen: int, slots: int
) -> None:
    arguments = append_arguments(rows, seen, slots)
    got = onnx_run(symbolic["append_attention"], "append_attention", arguments)
    wanted = call("append_attention", arguments)
    assert_close(got[0], wanted[0], RUNTIME)
    for side in (1, 2):  # slots after the seen ones are undefined if the buffers are not shared
        assert np.array_equal(got[side][:, :, :seen], wanted[side][:, :, :seen])


def bound_run(session: InferenceSession, arguments: tuple, aliased: bool) -> tuple[np.ndarray, list[np.ndarray]]:
    """The rows of the step and the caches that were given to it, afterwards."""
    tensors = OneOperator("append_attention", (arguments, {})).tensors
    values = {key: OrtValue.ortvalue_from_numpy(t.numpy().copy()) for key, t in tensors.items()}
    binding = session.io_binding()
    for node in session.get_inputs():
        binding.bind_ortvalue_input(node.name, values[node.name])
    binding.bind_output("out0")
    for output, cache in (("out1", "key_cache"), ("out2", "value_cache")):
        if aliased:
            binding.bind_ortvalue_output(output, values[cache])
        else:
            binding.bind_output(output)
    session.run_with_iobinding(binding)
    return binding.copy_outputs_to_cpu()[0], [values[side].numpy().copy() for side in ("key_cache", "value_cache")]


def test_append_attention_writes_a_shared_buffer_in_place(symbolic: dict[str, InferenceSession]) -> None:
    arguments = append_arguments(4, 12, 40)[0]
    wanted = call("append_attention", (arguments, {}))
    apart, untouched = bound_run(symbolic["append_attention"], arguments, aliased=False)
    shared, written = bound_run(symbolic["append_attention"], arguments, aliased=True)
    assert np.array_equal(shared, apart)
    for side in (0, 1):
        assert np.array_equal(untouched[side], arguments[3 + side])
        assert np.array_equal(written[side], wanted[1 + side])  # all 40 slots: nothing else was touched


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("rows", "seen"), [(1, 7), (5, 12), (4, 4)])
def test_append_attention_without_bias_hides_what_is_later(rows: int, seen: int) -> None:
    *before, bias, last, total, heads, kv_heads, scale = append_arguments(rows, seen)[0]
    open_, none = ((*before, b, last, total, heads, kv_heads, scale) for b in (torch.zeros_like(bias), None))
    wanted = call("append_attention", (open_, {}))
    assert all(map(torch.equal, call("append_attention", (none, {})), wanted))
    got = onnx_run(opened(exported("append_attention", (none, {}))), "append_attention", (none, {}))
    assert_close(got[0], wanted[0], RUNTIME)


def test_onnx_forms_take_the_schema_arguments() -> None:
    for contract in CONTRACTS.values():
        form: Contract | Callable | None = contract.onnx or contract.onnx_cpu
        if form is not None:
            names = [argument.name for argument in contract.operator._schema.arguments]
            declared = [n for n, p in inspect.signature(form).parameters.items() if p.kind != p.VAR_KEYWORD]
            assert set(declared) <= set(names), contract.name
