"""How fast this machine multiplies rows with a matrix in each form of eight and four bits, and its integer peak.

    python -m draftwood.tools.measure.products [--inputs 1280] [--outputs 7168] [--matrices 8] [--json]

Several matrices take turns, as the layers of a teacher do. The form that bundles have is "int8 a row": one scale of the
activations is of one row; with signed rows, or unsigned weights, sums are the same and other kernels make them. "int8 a
tensor" has one scale for all rows, so a row's result depends on its neighbours; blocks are onnxruntime's MatMulNBits
with integer products (accuracy level 4), a scale a block. No bundle can use these two: they are other functions.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from draftwood.kernels.quantised import LARGEST, LEAST
from draftwood.runtime.engines.sessions import default_threads, pool_options, products_saturate
from draftwood.tools.measure.machine import processor
from draftwood.tools.script import refusing

ROWS = (1, 2, 4, 8, 16, 32)
PEAK_ROWS = 512
_BLOCK, _ZERO_POINT = 32, 128
Node: TypeAlias = onnx.NodeProto
Values: TypeAlias = dict[str, NDArray[Any]]
Form: TypeAlias = Callable[[int, int, np.random.Generator], tuple[list[Node], Values]]


def _fp32(inputs: int, outputs: int, random: np.random.Generator) -> tuple[list[Node], Values]:
    values = {"w": random.standard_normal((inputs, outputs), np.float32)}
    return [helper.make_node("MatMul", ["x", "w"], ["y"])], values


def _whole(inputs: int, outputs: int, random: np.random.Generator) -> NDArray[np.int8]:
    return random.integers(-LARGEST, LARGEST + 1, (inputs, outputs)).astype(np.int8)


def _a_row(signed: bool = False, weights: type[np.integer[Any]] = np.int8) -> Form:
    """As `draftwood.kernels.quantised` writes it, or with ``signed`` rows, or ``weights`` around another zero."""

    def made(inputs: int, outputs: int, random: np.random.Generator) -> tuple[list[Node], Values]:
        whole = _whole(inputs, outputs, random)
        values: Values = {
            "w": whole if weights is np.int8 else (whole.astype(np.int16) + _ZERO_POINT).astype(weights),
            "scale": np.full(outputs, 0.01, np.float32), "axis": np.array([-1]),
            "least": np.array(LEAST, np.float32), "most": np.array(LARGEST, np.float32),
            "inverse": np.array(1 / LARGEST, np.float32),
            "middle": np.array(0 if signed else _ZERO_POINT, np.float32),
            "zero": np.array(0, np.int8) if signed else np.array(_ZERO_POINT, np.uint8),
            "weights_zero": np.array(0 if weights is np.int8 else _ZERO_POINT, weights),
        }  # fmt: skip
        steps = [
            ("Abs", "x", "abs"), ("ReduceMax", "abs axis", "peak"), ("Max", "peak least", "largest"),
            ("Div", "most largest", "factor"), ("Mul", "x factor", "scaled"), ("Round", "scaled", "round"),
            ("Add", "round middle", "moved"), ("Cast", "moved", "rows"),
            ("MatMulInteger", "rows w zero weights_zero", "sums"),
            ("Cast", "sums", "real"), ("Mul", "real scale", "wide"), ("Mul", "largest inverse", "row"),
            ("Mul", "wide row", "y"),
        ]  # fmt: skip
        types = {"rows": TensorProto.INT8 if signed else TensorProto.UINT8, "real": TensorProto.FLOAT}
        return [
            helper.make_node(kind, given.split(), [made], **({"to": types[made]} if kind == "Cast" else {}))
            for kind, given, made in steps
        ], values

    return made


def _a_tensor(inputs: int, outputs: int, random: np.random.Generator) -> tuple[list[Node], Values]:
    values: Values = {"w": _whole(inputs, outputs, random), "scale": np.array(0.01, np.float32)}
    return [helper.make_node("DynamicQuantizeMatMul", ["x", "w", "scale"], ["y"], domain="com.microsoft")], values


def _blocks(bits: int) -> Form:
    def made(inputs: int, outputs: int, random: np.random.Generator) -> tuple[list[Node], Values]:
        blocks = inputs // _BLOCK
        values: Values = {
            "w": random.integers(0, 256, (outputs, blocks, _BLOCK * bits // 8)).astype(np.uint8),
            "scale": np.full(outputs * blocks, 0.01, np.float32),
        }
        sizes = {"K": inputs, "N": outputs, "bits": bits, "block_size": _BLOCK, "accuracy_level": 4}
        return [helper.make_node("MatMulNBits", ["x", "w", "scale"], ["y"], domain="com.microsoft", **sizes)], values

    return made


FORMS = {
    "fp32": _fp32, "int8 a row": _a_row(), "signed rows": _a_row(signed=True),
    "unsigned weights": _a_row(weights=np.uint8), "int8 a tensor": _a_tensor,
    "int8 blocks": _blocks(8), "int4 blocks": _blocks(4),
}  # fmt: skip
SAME = ("int8 a row", "signed rows", "unsigned weights")  # one function


def product(form: str, inputs: int, outputs: int, threads: int, seed: int = 0) -> ort.InferenceSession:
    """A session of one product of float rows ``x`` [T, H]."""
    nodes, values = FORMS[form](inputs, outputs, np.random.default_rng(seed))
    ends = (("x", inputs), ("y", outputs))
    given, made = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["T", size]) for name, size in ends)
    tensors = [numpy_helper.from_array(value, name) for name, value in values.items()]
    domains = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(helper.make_graph(nodes, "product", [given], [made], tensors), opset_imports=domains)
    model.ir_version = 10
    options = pool_options(threads, spins=True)
    # Or those that wait rob the one that runs.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    if products_saturate():  # as a bundle's session then does
        options.add_session_config_entry("session.x64quantprecision", "1")
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def best_ms(sessions: Sequence[ort.InferenceSession], rows: int, inputs: int, repeats: int = 8) -> float:
    """Milliseconds of a product, the best mean of all matrices in turns."""
    x_TH, taken = np.random.default_rng(1).standard_normal((rows, inputs), np.float32), []
    for _ in range(repeats):
        began = time.perf_counter()
        for session in sessions:
            session.run(None, {"x": x_TH})
        taken.append(1e3 * (time.perf_counter() - began) / len(sessions))
    return min(taken)


def peak_gops(threads: int | None = None, inputs: int = 1280, outputs: int = 7168) -> float:
    """1e9 operations a second, a product and a sum being two, of int8 products of many rows: what can be reached."""
    session = product("int8 a row", inputs, outputs, threads or default_threads())
    return 2e-6 * PEAK_ROWS * inputs * outputs / best_ms([session], PEAK_ROWS, inputs)


@refusing
def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, default=1280, help="a multiple of 32 (%(default)s)")
    parser.add_argument("--outputs", type=int, default=7168, help="(%(default)s)")
    parser.add_argument("--matrices", type=int, default=8, help="that take turns (%(default)s)")
    parser.add_argument("--threads", type=int, help="default: all processors")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(arguments)
    inputs, threads = max(args.inputs // _BLOCK, 1) * _BLOCK, args.threads or default_threads()
    found = {}
    for form in FORMS:
        sessions = [product(form, inputs, args.outputs, threads, seed) for seed in range(args.matrices)]
        found[form] = {rows: best_ms(sessions, rows, inputs) for rows in ROWS}
    peak = peak_gops(threads, inputs, args.outputs)
    report = {"inputs": inputs, "outputs": args.outputs, "ms": found, "peak_gops": peak, "machine": processor()}
    print(json.dumps(report) if args.json else table(report))
    return 0


def table(report: dict[str, Any]) -> str:
    """The report for people."""
    lines = [f"ms of a product [rows, {report['inputs']}] x [{report['inputs']}, {report['outputs']}]"]
    lines += [f"{'rows':16}" + "".join(f"{rows:>9}" for rows in ROWS)]
    lines += [f"{form:16}" + "".join(f"{ms:9.3f}" for ms in by.values()) for form, by in report["ms"].items()]
    return "\n".join([*lines, f"int8 a row, {PEAK_ROWS} rows: {report['peak_gops']:.0f} Gop/s"])


if __name__ == "__main__":
    sys.exit(main())
