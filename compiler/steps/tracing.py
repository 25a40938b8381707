"""From a step to its ExportedProgram, the one source of every lowering."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import FrameSummary, StackSummary
from typing import Any
from unittest.mock import patch

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim, ExportedProgram

from draftwood.compiler.steps.step import Step

_TORCH = f"{Path(torch.__file__).parent}{os.sep}"


def trace(step: Step, device: torch.device | None = None) -> ExportedProgram:
    """torch.export of one step; on fake tensors if the step's module has them and their mode is on.

    ``device`` holds the module's weights, if not the host.
    """
    shapes = [
        {i: Dim.AUTO for i, size in enumerate(spec.shape) if isinstance(size, str)} or None
        for spec in step.signature.inputs
    ]
    # A step's caches are its variadic arguments, together with its other inputs; torch.export nests these as one tuple.
    plain = len(shapes) - len(step.signature.aliases) - step.read
    nested = (*shapes[:plain], tuple(shapes[plain:])) if plain < len(shapes) else tuple(shapes)
    with warnings.catch_warnings(), _traced_lines(), uncompiled():
        warnings.simplefilter("ignore")
        return torch.export.export(
            step.module.eval(), step.examples(device), dynamic_shapes=nested if step.dynamic else None, strict=False
        )


@contextmanager
def shapes_only(dtype: torch.dtype) -> Iterator[FakeTensorMode]:
    """In the body, modules are made of tensors without memory, in ``dtype``; trace them within the mode."""
    mode, default = FakeTensorMode(allow_non_fake_inputs=True), torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with mode:
            yield mode
    finally:
        torch.set_default_dtype(default)


@contextmanager
def uncompiled() -> Iterator[None]:
    """In the body, graphs are made into Python code when somebody looks at it, not whenever a pass has changed them: of
    twenty changes a trace reads one."""
    make = fx.GraphModule.recompile

    class Later:
        """In place of a graph's code until it is looked at; torch reads its signature, too."""

        def __get__(self, module: fx.GraphModule | None, kind: type) -> Any:
            if module is None:
                return self
            make(module)
            return module.forward

    def later(module: fx.GraphModule) -> None:
        if isinstance(module.graph._codegen, fx.graph._PyTreeCodeGen):
            module._in_spec, module._out_spec = module.graph._codegen.pytree_info[1:3]
        type(module).forward = Later()  # type: ignore[assignment]

    with patch.object(fx.GraphModule, "recompile", later):
        yield


@contextmanager
def _traced_lines() -> Iterator[None]:
    """Nodes note the frames within the outermost ``forward`` that they come from, down to the line that calls torch. By
    itself torch.export keeps ``forward`` methods only, and reads every frame's line from its file."""
    with (
        patch.object(fx.proxy, "CapturedTraceback", _Frames),
        # torch 2.8 has no such method, and filters nothing.
        patch.object(fx.proxy.TracerBase, "_filter_traceback_frames", lambda tracer, frames: frames, create=True),
    ):
        yield


class _Frames:
    """In place of torch's captured traceback."""

    @staticmethod
    def extract() -> type[_Frames]:
        return _Frames

    @staticmethod
    def summary() -> StackSummary:
        frame, frames, outermost = sys._getframe(1), list[FrameSummary](), 0
        while frame is not None and frame.f_code is not trace.__code__:
            code = frame.f_code
            if not code.co_filename.startswith(_TORCH):
                frames.append(FrameSummary(code.co_filename, frame.f_lineno, code.co_name, lookup_line=False))
                outermost = len(frames) if code.co_name == "forward" else outermost
            frame = frame.f_back  # type: ignore[assignment]
        return StackSummary.from_list(frames[:outermost][::-1])
