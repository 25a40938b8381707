"""The ONNX form of a mixture of experts: a loop, which onnxscript reads as a graph and does not run."""

from __future__ import annotations

from typing import Any

from onnxscript import FLOAT, INT32, script
from onnxscript.onnx_opset import opset18

# T rows, E experts, N rows of one of them

op: Any = opset18  # its stubs tie the element types of a whole expression together


# One round of the loop is one expert that some row has chosen.
@script()
def experts_loop(x: FLOAT, ids: INT32, shares: FLOAT, gate_up: FLOAT, down: FLOAT) -> FLOAT:
    zero = op.Constant(value_ints=[0])
    last = op.Constant(value_ints=[-1])
    experts = op.Slice(op.Shape(gate_up), zero, op.Constant(value_ints=[1]))
    rows = op.Slice(op.Shape(x), zero, op.Constant(value_ints=[1]))
    none_TE = op.ConstantOfShape(op.Concat(rows, experts, axis=0))
    share_TE = op.ScatterElements(none_TE, op.Cast(ids, to=7), shares, axis=1)
    chosen, _, _, _ = op.Unique(op.Cast(ids, to=7), sorted=1)
    total = op.ConstantOfShape(op.Shape(x))
    count = op.Size(chosen)
    for i in range(count):
        expert = op.Gather(chosen, i)
        share_T = op.Gather(share_TE, expert, axis=1)
        rows_N = op.Squeeze(op.NonZero(share_T), zero)
        both = op.Gemm(op.Gather(x, rows_N), op.Gather(gate_up, expert), transB=1)
        gate, up = op.Split(both, num_outputs=2, axis=-1)
        product = op.Mul(op.Mul(gate, op.Sigmoid(gate)), up)
        out = op.Gemm(product, op.Gather(down, expert), transB=1)
        weighed = op.Mul(out, op.Unsqueeze(op.Gather(share_T, rows_N), last))
        total = op.ScatterND(total, op.Unsqueeze(rows_N, last), weighed, reduction="add")
    return total
