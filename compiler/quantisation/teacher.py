"""Quantises a teacher's checkpoint: the function that ``draftwood quantize`` calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from draftwood.compiler.bundle.staging import staged
from draftwood.compiler.quantisation.calibration import NORMS, factors
from draftwood.compiler.quantisation.writing import Layout, write
from draftwood.compiler.teachers.checkpoint import Checkpoint
from draftwood.errors import RequestError

# The linear layers of a block that are quantised if present; a router and its experts are not.
_LAYERS = (*NORMS, "o", "down")


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A request to quantise a model. ``texts`` are token ids int64 [T] to calibrate with."""

    model: Path
    texts: Sequence[Tensor]
    layout: Layout = "compressed-tensors"
    # Whether the output matrix is quantised as well; a tied one gets its own values then.
    head: bool = False


def quantise(request: Request, out: Path, progress: Callable[[str], None] = lambda _: None) -> Checkpoint:
    """Writes the folder ``out``, whole or not at all, and opens it.

    Raises:
        CheckpointError: the teacher is unsupported or damaged.
        RequestError: the teacher is already quantised, or ``out`` exists.
    """
    checkpoint = Checkpoint.open(request.model)
    layers = _layers(checkpoint, request.head)
    with staged(out) as folder:
        layer_factors = factors(checkpoint, request.texts, progress)
        write(folder, checkpoint, layers, layer_factors, request.layout, progress)
    return Checkpoint.open(out)


def _layers(checkpoint: Checkpoint, head: bool) -> tuple[str, ...]:
    config = checkpoint.config
    if config.quantised:
        raise RequestError(f"{checkpoint.path}: is quantised already; name the original")
    named = (f"layers.{i}.{name}" for i in range(config.layers) for name in _LAYERS)
    layers = tuple(name for name in named if f"{name}.weight" in checkpoint.parts)
    return (*layers, "lm_head") if head else layers
