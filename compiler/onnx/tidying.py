"""Folding and rewriting of an exported graph before it is written.

The exporter's own tidying matches every rule of onnxscript at every node, one rule against all pairs of slices: a step
of eight texts took two minutes. The rules here are those that apply to our graphs.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import onnx_ir as ir
from onnx_ir.passes import Sequential, common
from onnxscript.optimizer import fold_constants_ir
from onnxscript.rewriter import rewrite
from onnxscript.rewriter.pattern import RewriteRule, RewriteRuleSet
from onnxscript.rewriter.rules import common as rules

RULES = (
    rules.mul_by_1_rule,
    rules.add_0_rule,
    rules.sub_0_rule,
    rules.div_by_1_rule,
    rules.two_reshapes_matmul_reshape_rule,
    rules.one_reshape_matmul_reshape_rule,
    rules.cast_constant_of_shape_rule,
    rules.cast_constant_of_shape_without_value_rule,
    rules.collapse_slice_rule,
    rules.collapse_slice2_rule,
    rules.materialize_reshape_shape_rule,
    rules.cast_cast_rule,
    rules.no_op_cast_rule,
    rules.no_op_expand_rule,
    rules.reshape_reshape_rule,
    rules.no_op_transpose_rule,
    rules.transpose_transpose_rule,
    rules.unsqueeze_unsqueeze_rule,
    rules.squeeze_reshape_1d_rule,
)
ROUNDS = 2  # a round's rewriting lets the next one fold


def tidy(model: ir.Model) -> None:
    """Changes ``model`` in place; its function stays."""
    common.InlinePass()(model)
    for _ in range(ROUNDS):
        fold_constants_ir(model, onnx_shape_inference=True)
        rewrite(model, _rules())
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)


class _Rule(RewriteRule):
    """A rule that is tried at nodes of the type alone that its pattern ends in."""

    def __init__(self, rule: RewriteRule) -> None:
        self.__dict__ |= rule.__dict__
        (last,) = rule._target_pattern.output_nodes
        self._type = last.op_type

    def try_rewrite(
        self, model: ir.Model, graph_or_function: ir.Graph | ir.Function, node: ir.Node, **options: Any
    ) -> Any:
        return super().try_rewrite(model, graph_or_function, node, **options) if node.op_type == self._type else None


@cache
def _rules() -> RewriteRuleSet:
    return RewriteRuleSet([_Rule(rule) for rule in RULES])


def finish(model: ir.Model) -> None:
    """Removes in place values that are held or computed twice; nodes that two operators' forms share are then one."""
    once = (common.DeduplicateInitializersPass(), common.CommonSubexpressionEliminationPass())
    Sequential(*once, common.OutputFixPass(), common.NameFixPass())(model)
