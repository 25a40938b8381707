"""Whether a static step on a CPU gains from caches with one row a token: one layer's write and attention, in turns.

    python -m draftwood.tools.measure.cache_layout [--slots 1024] [--rows 13] [--json]

"heads" is what static ONNX graphs have: [K * C, D], keys turned by MatMul. "tokens" is [C, K * D], where onnxruntime's
FusedMatMul reads the heads of a row in place, and "tokens turned" the same with a Transpose. "append" is
GroupQueryAttention, which the CPU's engine runs and whose caches are head by head by its definition. All forms take
turns, and the least time of each is compared, for other work on the machine only adds.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from draftwood.runtime.engines.sessions import pool_options
from draftwood.tools.measure.machine import processor
from draftwood.tools.script import refusing

FORMS = ("heads", "tokens", "tokens turned", "append")
Node: TypeAlias = onnx.NodeProto
Values: TypeAlias = dict[str, NDArray[Any]]

# C slots, T rows, N query heads, K key/value heads, D head dimension


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of one layer and one step; ``filled`` of the slots hold text, the rows behind them included."""

    slots: int = 1024
    rows: int = 13
    heads: int = 16
    kv_heads: int = 4
    dim: int = 64

    @property
    def filled(self) -> int:
        return self.slots // 2 + self.rows


def layer(form: str, sizes: Sizes) -> tuple[list[Node], Values, Values]:
    """(nodes, constants, inputs) that write keys and values and attend; ``out`` is [T, N*D] or [1, T, N*D]."""
    c, t, n, k, d = sizes.slots, sizes.rows, sizes.heads, sizes.kv_heads, sizes.dim
    new = np.arange(sizes.filled - t, sizes.filled)
    random = np.random.default_rng(0)
    q, key, value = (random.standard_normal((t, h * d), np.float32) for h in (n, k, k))
    if form == "append":
        caches = {name: np.zeros((1, k, c, d), np.float32) for name in ("keys", "values")}
        given = {"q": q[None], "k": key[None], "v": value[None]} | caches
        ends = {"last": np.array([sizes.filled - 1], np.int32), "total": np.array(sizes.filled, np.int32)}
        options = {"num_heads": n, "kv_num_heads": k, "scale": d**-0.5, "do_rotary": 0}
        names = ["q", "k", "v", "keys", "values", "last", "total"]
        outputs = ["out", "keys.out", "values.out"]
        return [helper.make_node("GroupQueryAttention", names, outputs, domain="com.microsoft", **options)], ends, given
    by_head = form == "heads"
    index = (new[:, None] + np.arange(k) * c).reshape(-1, 1) if by_head else new[:, None]
    shape = (k * c, d) if by_head else (c, k * d)
    given = {"q": q, "k": key, "v": value} | {name: np.zeros(shape, np.float32) for name in ("keys", "values")}
    order = np.arange(c)
    values: Values = {
        "index": index, "scale": np.array(d**-0.5, np.float32), "flat": np.array([t, n * d]),
        "grouped": np.array([t, k, n // k, d]), "stacked": np.array([k, n // k * t, d]),
        "apart": np.array([k, n // k, t, d]), "written": np.array([-1, shape[1]]),
        "shaped": np.array([k, c, d] if by_head else [c, k, d]), "split": np.array([k, n // k, t, c]),
        "joined": np.array([k, n // k * t, c]), "hidden": np.array(-3e38, np.float32), "seen": order <= new[:, None],
    }  # fmt: skip
    return [*_written(), *_attended(form)], values, given


def _written() -> list[Node]:
    nodes = []
    for rows, cache in (("k", "keys"), ("v", "values")):
        nodes += [
            helper.make_node("Reshape", [rows, "written"], [f"{rows}.rows"]),
            helper.make_node("ScatterND", [cache, "index", f"{rows}.rows"], [f"{cache}.out"]),
            helper.make_node("Reshape", [f"{cache}.out", "shaped"], [f"{cache}.read"]),
        ]
    return nodes


def _attended(form: str) -> list[Node]:
    fused = {"domain": "com.microsoft"}
    turned = {"perm": [1, 0, 2]}
    before = {
        "tokens turned": [
            helper.make_node("Transpose", ["keys.read"], ["keys.heads"], perm=[1, 2, 0]),
            helper.make_node("Transpose", ["values.read"], ["values.heads"], **turned),
        ],
        "heads": [helper.make_node("Transpose", ["keys.read"], ["keys.heads"], perm=[0, 2, 1])],
    }.get(form, [])
    if form == "tokens":
        scores = helper.make_node("FusedMatMul", ["rows", "keys.read"], ["dots"], transB=1, transBatchB=1, **fused)
        mixed = helper.make_node("FusedMatMul", ["weights", "values.read"], ["mixed"], transBatchB=1, **fused)
    else:
        scores = helper.make_node("MatMul", ["rows", "keys.heads"], ["dots"])
        values = "values.read" if form == "heads" else "values.heads"
        mixed = helper.make_node("MatMul", ["weights", values], ["mixed"])
    return [
        *before,
        helper.make_node("Reshape", ["q", "grouped"], ["q.heads"]),
        helper.make_node("Transpose", ["q.heads"], ["q.turned"], perm=[1, 2, 0, 3]),
        helper.make_node("Reshape", ["q.turned", "stacked"], ["rows"]),
        scores,
        helper.make_node("Mul", ["dots", "scale"], ["scaled"]),
        helper.make_node("Reshape", ["scaled", "split"], ["scores"]),
        helper.make_node("Where", ["seen", "scores", "hidden"], ["shown"]),
        helper.make_node("Softmax", ["shown"], ["shares"], axis=-1),
        helper.make_node("Reshape", ["shares", "joined"], ["weights"]),
        mixed,
        helper.make_node("Reshape", ["mixed", "apart"], ["mixed.rows"]),
        helper.make_node("Transpose", ["mixed.rows"], ["mixed.turned"], perm=[2, 0, 1, 3]),
        helper.make_node("Reshape", ["mixed.turned", "flat"], ["out"]),
    ]


class Bound:
    """A session of one form whose caches are written in place, as engines bind them."""

    def __init__(self, form: str, sizes: Sizes, threads: int) -> None:
        nodes, constants, self.given = layer(form, sizes)
        kinds = {name: helper.np_dtype_to_tensor_dtype(array.dtype) for name, array in self.given.items()}
        inputs = [helper.make_tensor_value_info(n, kinds[n], a.shape) for n, a in self.given.items()]
        names = ("out", "keys.out", "values.out")
        outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in names]
        held = [numpy_helper.from_array(value, name) for name, value in constants.items()]
        domains = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
        model = helper.make_model(helper.make_graph(nodes, "layer", inputs, outputs, held), opset_imports=domains)
        model.ir_version = 10
        self.session = ort.InferenceSession(
            model.SerializeToString(), pool_options(threads, spins=False), providers=["CPUExecutionProvider"]
        )
        self.out = np.zeros((sizes.rows, sizes.heads * sizes.dim), np.float32)
        self._binding = self.session.io_binding()
        for name, array in self.given.items():
            self._binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        shape = (1, *self.out.shape) if form == "append" else self.out.shape
        self._binding.bind_output("out", "cpu", 0, np.float32, shape, self.out.ctypes.data)
        for name in ("keys", "values"):
            array = self.given[name]
            self._binding.bind_output(f"{name}.out", "cpu", 0, np.float32, array.shape, array.ctypes.data)

    def run(self) -> float:
        """Milliseconds."""
        began = time.perf_counter()
        self.session.run_with_iobinding(self._binding)
        return 1e3 * (time.perf_counter() - began)


def measure(sizes: Sizes, threads: int, rounds: int) -> dict[str, float]:
    """Least milliseconds of a layer in every form, one round after the other."""
    forms = {form: Bound(form, sizes, threads) for form in FORMS}
    taken = [{form: bound.run() for form, bound in forms.items()} for _ in range(rounds)]
    return {form: min(one[form] for one in taken) for form in FORMS}


@refusing
def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--slots", type=int, default=1024, help="(%(default)s)")
    parser.add_argument("--rows", type=int, default=13, help="(%(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="(%(default)s)")
    parser.add_argument("--rounds", type=int, default=200, help="(%(default)s)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(arguments)
    least = measure(Sizes(slots=args.slots, rows=args.rows), args.threads, args.rounds)
    found = {form: {"ms": ms, "of_heads": ms / least["heads"]} for form, ms in least.items()}
    report = {"slots": args.slots, "rows": args.rows, "forms": found, "machine": processor()}
    lines = [f"{form:14}{one['ms']:9.3f} ms{one['of_heads']:7.2f} of heads" for form, one in found.items()]
    print(json.dumps(report) if args.json else "\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
