"""The ONNX graph of a traced module, made as a bundle's graphs are, and onnxruntime on it."""

from collections.abc import Sequence

import onnx
import onnx_ir as ir
import onnxruntime
from torch.export import ExportedProgram

from draftwood.compiler.onnx.exporter import export
from draftwood.compiler.onnx.tidying import tidy


def onnx_graph(
    program: ExportedProgram, inputs: Sequence[str] = (), outputs: Sequence[str] = (), *, cpu: bool
) -> ir.Model:
    """With the weights in it; ``cpu`` allows operators that onnxruntime alone has."""
    model = export(program, inputs, outputs, cpu)
    tidy(model)
    return model


def opened(model: ir.Model, exact: bool = False) -> onnxruntime.InferenceSession:
    """A session on the CPU, after ONNX's own check; ``exact`` keeps products of whole numbers from saturating."""
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto)
    options = onnxruntime.SessionOptions()
    options.use_per_session_threads = False  # the pool of tests/conftest.py
    options.add_session_config_entry("session.x64quantprecision", str(int(exact)))
    return onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
