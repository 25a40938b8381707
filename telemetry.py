"""Packages that report their use are told not to: what a service does with a model is nobody else's business.

onnxruntime 1.29 and later names the models that a process opens, and how they run, to Microsoft, and keeps a number for
the machine in ~/.cache/Microsoft (microsoft/onnxruntime#27379). OpenVINO tells Google Analytics that it was imported
(openvino/tools/ovc/__init__.py).
"""

import os
import sys
from typing import Any

_REPORTER = "openvino_telemetry"


def hush_onnxruntime() -> None:
    """To be called before onnxruntime is imported; a choice of the user stands.

    Goes through the environment, so that processes started from this one are silent as well.
    """
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")


def import_openvino() -> Any:
    """The package openvino, which finds no package to report with while it is imported.

    Raises:
        ImportError: it is not installed.
    """
    known = _REPORTER in sys.modules
    sys.modules.setdefault(_REPORTER, None)  # type: ignore[arg-type] # the import system takes None for "no such module"
    try:
        import openvino
    finally:
        if not known:
            del sys.modules[_REPORTER]
    return openvino
