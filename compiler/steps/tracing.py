"""From a step to its ExportedProgram, the one source of every lowering."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import StackSummary
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
    with warnings.catch_warnings(), patch.object(fx.proxy.TracerBase, "_filter_traceback_frames", _own_frames):
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


def _own_frames(tracer: fx.proxy.TracerBase, frames: StackSummary) -> StackSummary:
    """Where a node comes from, down to the line that calls torch; torch.export alone keeps ``forward`` methods only."""
    outside = [frame for frame in frames if not frame.filename.startswith(_TORCH)]
    start = next((i for i, frame in enumerate(outside) if frame.name == "forward"), len(outside))
    return StackSummary.from_list(outside[start:])
