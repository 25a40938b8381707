"""What the exporter and its tidying leave out changes no graph."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import onnx
import onnx_ir as ir
import pytest
import torch
from onnxscript.rewriter.pattern import RewriteRuleSet
from torch import Tensor, nn
from torch.onnx._internal.fx.passes import InsertTypePromotion

from draftwood.compiler.onnx import exporter, tidying
from draftwood.compiler.onnx.exporter import export
from draftwood.compiler.steps.step import StepSizes
from draftwood.compiler.steps.tracing import trace
from draftwood.compiler.steps.verify import verify_step


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory, save_llama: Callable, load_decoder: Callable) -> Callable:
    """The same graph as often as it is asked for."""
    folder = tmp_path_factory.mktemp("teacher")
    save_llama(folder, num_hidden_layers=1)
    step = verify_step(load_decoder(folder, 64), StepSizes(branch_rows=4, path_rows=3), 4, 64)
    program = trace(step)
    names = [[one.name for one in some] for some in (step.signature.inputs, step.signature.outputs)]
    return lambda: export(program, *names, cpu=False)


def nodes(model: ir.Model) -> list[str]:
    return [str(node) for node in model.graph]


def test_a_rule_is_tried_where_its_pattern_can_end(exported: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    tried, honest = Counter[str](), tidying.RewriteRule.try_rewrite

    def counted(rule: Any, model: Any, graph: Any, node: ir.Node, **options: Any) -> Any:
        tried[rule.name, node.op_type] += 1
        return honest(rule, model, graph, node, **options)

    got, want = exported(), exported()
    monkeypatch.setattr(tidying.RewriteRule, "try_rewrite", counted)
    tidying.tidy(got)
    few = tried.total()
    monkeypatch.setattr(tidying, "_rules", lambda: RewriteRuleSet(list(tidying.RULES)))
    tidying.tidy(want)
    assert nodes(got) == nodes(want) != nodes(exported())
    assert 0 < few < tried.total() / 5


def test_a_schema_is_read_once(exported: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    read = Counter[str]()
    honest = ir.schemas.OpSignature.from_op_schema

    def counted(schema: onnx.defs.OpSchema) -> ir.schemas.OpSignature:
        read[schema.name] += 1
        return honest(schema)

    monkeypatch.setattr(ir.schemas.OpSignature, "from_op_schema", counted)
    found = Counter(node.op_type for node in exported().graph)
    exported()
    assert found["MatMul"] > 1 and max(read.values(), default=0) <= 1, read


class Mixed(nn.Module):
    """Operators that promote: of whole numbers and others, to others, and of truth values."""

    def forward(self, whole: Tensor, part: Tensor) -> tuple[Tensor, ...]:
        mixed = whole + part * 2
        return mixed, torch.div(whole, whole), torch.where(whole > part, mixed, whole), torch.exp(whole) + (whole > 1)


def test_casts_are_those_that_a_run_of_every_node_adds() -> None:
    def promoted(insert: Callable) -> list[tuple[str, ...]]:
        program = torch.export.export(Mixed(), (torch.arange(3), torch.ones(3)), strict=False).run_decompositions({})
        module = insert(InsertTypePromotion(program.graph_module))
        return [(n.name, str(n.target), str(n.args), str(n.meta.get("val"))) for n in module.graph.nodes]

    got = promoted(exporter._promote)
    assert got == promoted(lambda insertion: insertion.run())
    assert sum("convert_element_type" in target for _, target, *_ in got) > 2
