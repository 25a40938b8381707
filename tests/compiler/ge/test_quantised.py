"""W8A8 on an NPU: the operators' arithmetic, the graphs of a quantised teacher, and the cost of a step."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from draftwood.compiler.bundle.build import build
from draftwood.compiler.bundle.request import BuildRequest
from draftwood.compiler.device.devices import device
from draftwood.compiler.device.steps import step_s
from draftwood.compiler.ge.graph import Declared, Edge, Graph, Node
from draftwood.compiler.ge.operator_rules import RULES, Use
from draftwood.compiler.ge.operators import OPERATORS, attribute
from draftwood.compiler.ge.operators.table import Refusal
from draftwood.compiler.teachers.registry import read_config
from draftwood.errors import LoweringError
from draftwood.kernels.quantised import products, quantise_rows
from draftwood.runtime.bundle import Bundle
from draftwood.tools.comparison.check import check
from draftwood.tools.demo import resolve
from draftwood.trees import Topology

# T rows, H inputs, O outputs
H, O = 1500, 40  # noqa: E741


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_the_npus_operators_give_the_eager_result_bit_for_bit(kind: torch.dtype, bias: bool) -> None:
    """Whole numbers are those that a CPU's graph multiplies: its rows are rounded by the same formula."""
    x, scale = random(5, H, seed=0).to(kind), random(O, seed=2).abs() * 1e-3
    x[2] = 0
    weight = torch.randint(-128, 128, (H, O), dtype=torch.int8, generator=torch.Generator().manual_seed(1))
    added = random(O, seed=3).to(kind) if bias else None
    whole, rows = OPERATORS["DynamicQuant"].function(x)
    assert torch.equal(whole, quantise_rows(x.float())[0]) and rows.shape == (5,) and rows[2] == 0
    assert torch.equal(products(whole, weight).long(), whole.long() @ weight.long())
    number = {torch.float16: 1, torch.bfloat16: 27}[kind]
    got = OPERATORS["QuantBatchMatmulV3"].function(whole, weight, scale, added, rows, dtype=number)
    assert torch.equal(got, torch.ops.draftwood.quantised_linear(x, weight, scale, added))
    turned = OPERATORS["QuantBatchMatmulV3"].function(
        whole, weight.t().contiguous(), scale, added, rows, dtype=number, transpose_x2=True
    )
    assert torch.equal(got, turned)


def test_rows_are_rounded_where_they_are_made_bit_for_bit() -> None:
    """The interpreter equals the eager operators, and refuses cases that it does not cover."""
    x1, x2, gamma = (random(*shape, seed=i).bfloat16() for i, shape in enumerate(((5, H), (5, H), (H,))))
    want = torch.ops.npu.npu_add_rms_norm_dynamic_quant(x1, x2, gamma, epsilon=1e-5)
    got = OPERATORS["AddRmsNormDynamicQuant"].function(x1, x2, gamma, epsilon=1e-5)
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))
    activation = OPERATORS["DequantSwigluQuant"].function
    want = torch.ops.npu.npu_dequant_swiglu_quant(x1, activate_left=True, quant_mode=1)
    got = activation(x1, activate_left=True, quant_mode="dynamic")
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    with pytest.raises(Refusal, match="quant_mode = 'static'"):
        activation(x1)
    with pytest.raises(Refusal, match="output_mask"):
        OPERATORS["AddRmsNormDynamicQuant"].function(x1, x2, gamma, output_mask=[True, True])


@pytest.fixture(scope="module")
def bundle(quantised_teacher: Path, tiny_heads: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    trees = (("plain", Topology.plain()), ("ragged", Topology.from_paths(((0,), (1,), (0, 0)))))
    folder = tmp_path_factory.mktemp("npu") / "bundle"
    build(
        BuildRequest(
            model=quantised_teacher, drafter=tiny_heads, trees=trees, slots=(128,), prefill_rows=(8,), targets=("ge",)
        ),
        folder,
    )
    return Bundle.open(folder)


def test_graphs_hold_whole_numbers_and_turn_nothing_around(bundle: Bundle) -> None:
    """Of two layers three norms and both activations round their rows themselves. Three are left: the first norm's, the
    attention's, and the last norm's, which the drafter reads as well."""
    for name, scored, rounded in (("decode-kv128", 9, 4), ("verify-t4-kv128", 9, 4), ("draft", 1, 1)):
        counts = Graph.load(bundle.folder / f"npu/{name}.air").counts()
        assert counts["QuantBatchMatmulV3"] == scored and counts["DynamicQuant"] == rounded, name
        if scored > 1:
            assert counts["AddRmsNormDynamicQuant"] == 3 and counts["DequantSwigluQuant"] == 2, name
            assert counts["AddRmsNorm"] == 1 and "SwiGlu" not in counts
        assert counts.get("Transpose", 0) == (scored > 1), "nothing but moved rows is turned around"
    graphs = bundle.manifest.graph_set("ge")
    assert graphs is not None and graphs.precision.name == "w8a8-bf16" and graphs.precision.caches == "bfloat16"


def test_the_interpreter_agrees_with_eager_and_catches_every_fault(bundle: Bundle) -> None:
    report = check(bundle, [np.arange(3, 30)])
    assert report["ok"], [c for c in report["comparisons"] if not c["ok"]] + report["controls"]


def test_norms_with_the_operators_own_epsilon(
    save_tiny: Callable[..., Path], save_quantised: Callable[..., Path], tmp_path: Path
) -> None:
    """1e-6, as Qwen2.5 and Qwen3 have it: torch.export and torchair leave out what equals a default."""
    (tmp_path / "plain").mkdir()
    model = save_quantised(save_tiny(tmp_path / "plain", rms_norm_eps=1e-6), tmp_path / "quantised")
    trees = (("plain", Topology.plain()),)
    build(
        BuildRequest(model=model, drafter=None, trees=trees, slots=(128,), prefill_rows=(), targets=("ge",)),
        tmp_path / "bundle",
    )
    graph = Graph.load(tmp_path / "bundle/npu/decode-kv128.air")
    norms = [node for node in graph.nodes.values() if node.type == "AddRmsNormDynamicQuant"]
    assert [attribute(node, "epsilon") for node in norms] == [1e-6] * 3
    with pytest.raises(LoweringError, match="attribute k is missing"):
        attribute(replace(norms[0], type="MoeGatingTopKSoftmax", attributes={}), "k")


def test_a_step_of_a_7b_teacher_streams_half_the_bytes() -> None:
    config = read_config(resolve("shape:openpangu-embedded-7b"))
    names = tuple(f"layers.{i}.{name}" for i in range(config.layers) for name in ("qkv", "o", "gate_up", "down"))
    part, whole = replace(config, quantised=names), replace(config, quantised=(*names, "lm_head"))
    plain_s, part_s, whole_s = (step_s(device("ascend-910b3"), one, 1, 1024) for one in (config, part, whole))
    assert plain_s == pytest.approx(15.55e-3, rel=0.005)
    assert part_s == pytest.approx(9.28e-3, rel=0.005) and whole_s == pytest.approx(8.68e-3, rel=0.005)


Given = dict[str, tuple[torch.dtype, tuple[int, ...]]]


def broken_rules(**changed: tuple[torch.dtype, tuple[int, ...]]) -> list[str]:
    """Levels and messages for a single product, with some operands of another type or shape."""
    given = {"x1": (torch.int8, (7, 64)), "x2": (torch.int8, (64, 32)), "scale": (torch.float32, (32,))}
    given |= {"pertoken_scale": (torch.float32, (7,)), "bias": (torch.bfloat16, (32,))} | changed
    return broken_by("QuantBatchMatmulV3", given, (torch.bfloat16, (7, given["x2"][1][-1])))


def broken_by(kind: str, given: Given, result: tuple[torch.dtype, tuple[int, ...]], **attributes: float) -> list[str]:
    """Levels and messages of one operator alone, element types aside."""
    declared = tuple(Declared(name, None, None) for name in given)
    edges = tuple(Edge(name, 0) for name in given)
    node = Node("n", kind, edges, attributes, declared, (Declared("y", None, None),))
    found = RULES[kind].find(Use(Graph("g", {"n": node}), node, given, (result,)))
    return [f"{level}: {message}" for level, message in found]


def test_what_breaks_a_rule_of_the_product_is_found() -> None:
    assert broken_rules() == []
    assert any("expected matrices" in text for text in broken_rules(x1=(torch.int8, (1, 7, 64))))
    assert any("scale is" in text for text in broken_rules(scale=(torch.bfloat16, (32,))))
    assert any("pertoken_scale is" in text for text in broken_rules(pertoken_scale=(torch.float32, (7, 1))))
    assert any("bias is" in text for text in broken_rules(bias=(torch.int32, (31,))))
    wide = broken_rules(x2=(torch.int8, (64, 70000)), scale=(torch.float32, (70000,)), bias=(torch.bfloat16, (70000,)))
    assert wide == ["warning: 70000 columns; CANN before 9.1 takes 65535 at most"]


def test_what_breaks_a_rule_of_rounding_operators_is_found() -> None:
    half, rows = torch.bfloat16, (torch.int8, (7, 64))
    norm = {"x1": (half, (7, 64)), "x2": (half, (7, 64)), "gamma": (half, (64,))}
    assert broken_by("AddRmsNormDynamicQuant", norm, rows, epsilon=1e-5) == []
    assert broken_by("AddRmsNormDynamicQuant", norm, rows) == [], "1e-6, the definition's own, is left out of graphs"
    assert any("epsilon is 0" in text for text in broken_by("AddRmsNormDynamicQuant", norm, rows, epsilon=0))
    wide = norm | {"gamma": (torch.float32, (64,))}
    assert any("gamma" in text for text in broken_by("AddRmsNormDynamicQuant", wide, rows, epsilon=1e-5))
    assert broken_by("DequantSwigluQuant", {"x": (half, (7, 128))}, rows) == []
    assert any("even" in text for text in broken_by("DequantSwigluQuant", {"x": (half, (7, 127))}, rows))
    assert any("vector core" in text for text in broken_by("DequantSwigluQuant", {"x": (half, (7, 25600))}, rows))
