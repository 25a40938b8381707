"""The ONNX form of cutting rows of qkv, which onnxscript reads as a graph and does not run."""

from __future__ import annotations

from typing import Any

from onnxscript import FLOAT, INT64, script
from onnxscript.onnx_opset import opset18

op: Any = opset18  # its stubs tie the element types of a whole expression together


# A Split into unequal parts does not say how many there are.
@script()
def apart(x: FLOAT, widths: INT64) -> tuple[FLOAT, FLOAT, FLOAT]:
    """q, k and v."""
    q, k, v = op.Split(x, widths, axis=-1)
    return q, k, v
