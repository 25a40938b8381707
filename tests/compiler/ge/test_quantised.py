"""W8A8 on an NPU: the operators' arithmetic, the graphs of a quantised teacher, and what a step of it costs."""

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
from draftwood.compiler.ge.operator_rules import Use, broken
from draftwood.compiler.ge.operators import OPERATORS
from draftwood.compiler.teachers.registry import read_config
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
    for name, scored in (("decode-kv128", 9), ("verify-t4-kv128", 9), ("draft", 1)):
        counts = Graph.load(bundle.folder / f"npu/{name}.air").counts()
        assert counts["QuantBatchMatmulV3"] == counts["DynamicQuant"] == scored, name
        assert not {"Transpose", "TransposeD"} & counts.keys()
    graphs = bundle.manifest.graph_set("ge")
    assert graphs is not None and graphs.precision.name == "w8a8-bf16" and graphs.precision.caches == "bfloat16"


def test_the_interpreter_agrees_with_eager_and_catches_every_fault(bundle: Bundle) -> None:
    report = check(bundle, [np.arange(3, 30)])
    assert report["ok"], [c for c in report["comparisons"] if not c["ok"]] + report["controls"]


def test_a_step_of_a_7b_teacher_streams_half_the_bytes() -> None:
    config = read_config(resolve("shape:openpangu-embedded-7b"))
    names = tuple(f"layers.{i}.{name}" for i in range(config.layers) for name in ("qkv", "o", "gate_up", "down"))
    part, whole = replace(config, quantised=names), replace(config, quantised=(*names, "lm_head"))
    plain_s, part_s, whole_s = (step_s(device("ascend-910b3"), one, 1, 1024) for one in (config, part, whole))
    assert plain_s == pytest.approx(15.7e-3, rel=0.01)
    assert part_s == pytest.approx(9.54e-3, rel=0.01) and whole_s == pytest.approx(8.95e-3, rel=0.01)


def broken_rules(**changed: tuple[torch.dtype, tuple[int, ...]]) -> list[str]:
    """Levels and messages of a product of its own, some operands of which are of another type or shape."""
    given = {"x1": (torch.int8, (7, 64)), "x2": (torch.int8, (64, 32)), "scale": (torch.float32, (32,))}
    given |= {"pertoken_scale": (torch.float32, (7,)), "bias": (torch.bfloat16, (32,))} | changed
    declared = tuple(Declared(name, None, None) for name in given)
    edges = tuple(Edge(name, 0) for name in given)
    node = Node("n", "QuantBatchMatmulV3", edges, {}, declared, (Declared("y", None, None),))
    result = (torch.bfloat16, (7, given["x2"][1][-1]))
    found = broken(Use(Graph("g", {"n": node}), node, given, (result,)))
    return [f"{level}: {message}" for level, message, source in found if source]


def test_what_breaks_a_rule_of_the_product_is_found() -> None:
    assert broken_rules() == []
    assert "error: int32; expected one of int8" in broken_rules(x1=(torch.int32, (7, 64)))
    assert any("expected matrices" in text for text in broken_rules(x1=(torch.int8, (1, 7, 64))))
    assert any("scale is" in text for text in broken_rules(scale=(torch.bfloat16, (32,))))
    assert any("pertoken_scale is" in text for text in broken_rules(pertoken_scale=(torch.float32, (7, 1))))
    assert any("bias is" in text for text in broken_rules(bias=(torch.int32, (31,))))
    wide = broken_rules(x2=(torch.int8, (64, 70000)), scale=(torch.float32, (70000,)), bias=(torch.bfloat16, (70000,)))
    assert wide == ["warning: 70000 columns; CANN before 9.1 takes 65535 at most"]
