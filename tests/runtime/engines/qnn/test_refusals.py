"""A graph that an HTP's compiler does not take gives one line; one that it would take wrongly has another form."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

import draftwood
from draftwood.errors import BundleError
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.engines import qnn
from draftwood.runtime.engines.qnn import Htp, HtpEngine


def saved(path: Path, nodes: list[onnx.NodeProto], shape: list[int], **constants: np.ndarray) -> Path:
    """A graph from ``x`` to ``y``."""
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in "xy"]
    held = [numpy_helper.from_array(value, name) for name, value in constants.items()]
    graph = helper.make_graph(nodes, "graph", ends[:1], ends[1:], held)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), path)
    return path


def test_a_norm_of_large_states_is_right(tmp_path: Path) -> None:
    """Squares of more than 255 are no numbers in fp16, so they must not be made."""
    node = helper.make_node
    nodes = [
        node("Pow", ["x", "two"], ["squares"]),
        node("ReduceMean", ["squares", "last"], ["mean"], keepdims=1),
        node("Add", ["mean", "epsilon"], ["added"]),
        node("Sqrt", ["added"], ["rms"]),
        node("Div", ["x", "rms"], ["normed"]),
        node("Mul", ["normed", "gamma"], ["y"]),
    ]
    numbers = {"two": np.float32(2), "epsilon": np.float32(1e-5), "gamma": np.full(64, 0.5, np.float32)}
    path = saved(tmp_path / "norm.onnx", nodes, [2, 64], last=np.array([-1]), **numbers)
    x = np.random.default_rng(0).standard_normal((2, 64), np.float32) * np.float32([[400], [0.1]])
    want = 0.5 * x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-5)
    (got,) = Htp().session(path, 1).run(None, {"x": x})
    np.testing.assert_allclose(got, want, rtol=0, atol=4e-3)  # a few roundings of 5e-4, of values up to 2


def test_what_the_compiler_does_not_take_is_named(tmp_path: Path) -> None:
    nodes = [helper.make_node("Relu", ["x"], ["r"]), helper.make_node("Trilu", ["r"], ["y"], name="lower", upper=0)]
    path = saved(tmp_path / "odd.onnx", nodes, [4, 4])
    with pytest.raises(BundleError) as caught:
        Htp().session(path, 1)
    assert "does not take Trilu (lower); expected operators of its own" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_without_the_package_it_says_so(python: Callable[..., str]) -> None:
    code = """
from draftwood.errors import RequestError
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.engines import qnn
from draftwood.runtime.engines.qnn import Htp, HtpEngine
try:
    Htp()
except RequestError as error:
    print(error)
"""
    assert python(code, blocked=("onnxruntime_qnn",)).strip() == (
        "--engine qnn: needs the package onnxruntime-qnn, which is not installed: pip install 'draftwood[qnn]'"
    )


def test_a_refused_node_says_its_name_and_fallback_decodes_without(
    tiny_bundle: Path, tmp_path: Path, short_prompt: NDArray[np.int64], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for an operator in one of the bundle's graphs; that nodes are named by their line is tested where they are."""
    odd = [helper.make_node("Trilu", ["x"], ["y"], name="node_tril@compiler/steps/verify.py:7", upper=0)]
    path = saved(tmp_path / "odd.onnx", odd, [4, 4])
    monkeypatch.setattr(qnn, "_fused", lambda *given: path)
    with draftwood.open(tiny_bundle, engine="qnn", fallback=True) as model:
        assert re.search(
            r"--engine qnn: .*does not take Trilu \(node_tril@compiler/steps/verify.py:7\)", str(model.refused)
        )
        assert model.engine_name == "cpu"
        assert len(model.generate(short_prompt.tolist(), max_new_tokens=4, ignore_eos=True).token_ids) == 4


def test_rows_in_eight_bits_are_refused(tiny_bundle: Path) -> None:
    bundle = Bundle.open(tiny_bundle)
    teacher = bundle.manifest.teacher
    int8 = msgspec.structs.replace(teacher, config=teacher.config | {"quantised": ["layers.0.qkv"]})
    with pytest.raises(BundleError, match=r"rounds rows to int8, which .* build it with --precision nbits") as caught:
        HtpEngine(replace(bundle, manifest=msgspec.structs.replace(bundle.manifest, teacher=int8)))
    assert "\n" not in str(caught.value)
