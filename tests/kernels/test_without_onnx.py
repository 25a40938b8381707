"""A machine with an NPU has no ONNX: all that lowers, compiles and checks there is imported without it."""

from collections.abc import Callable

ONNX = ("onnx", "onnxscript", "onnx_ir", "matplotlib", "gguf")
MODULES = (
    *("compiler.bundle.build", "compiler.targets.online", "compiler.targets.captured", "tools.comparison.check"),
    *("tools.doctor.npu_probe", "tools.doctor.ranks_probe", "tools.commands.profile", "tools.commands.bench"),
)


def test_the_modules_of_a_device_need_no_onnx(python: Callable[..., str]) -> None:
    """Nor do they start torch's compiler, a second of every process, before a step is compiled."""
    code = f"import importlib, sys\nfor name in {MODULES}: importlib.import_module('draftwood.' + name)\n"
    assert python(f"{code}print('torch._dynamo' in sys.modules)", blocked=ONNX) == "False\n"
