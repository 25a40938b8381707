"""Calibration: the factors that move each norm's output scales into the weights that read them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from draftwood.compiler.quantisation.blocks import Blocks
from draftwood.compiler.quantisation.rounding import migrated
from draftwood.compiler.teachers.checkpoint import Checkpoint

# T rows of a text, H hidden

# Linear layer -> the norm whose outputs it reads, and nothing else does.
NORMS = {"qkv": "attn_norm", "gate_up": "mlp_norm"}
# Rows of a text that count: enough to see which columns are large.
_ROWS = 64


def factors(checkpoint: Checkpoint, texts: Sequence[Tensor], progress: Callable[[str], None]) -> dict[str, Tensor]:
    """Our names of linear layers -> powers of two [H] for the columns of their weights; norms are divided by them."""
    rows: dict[str, list[Tensor]] = {}
    factors_of_layers: dict[str, Tensor] = {}

    def watch(name: str, input_TH: Tensor) -> None:
        if name in NORMS:
            rows.setdefault(name, []).append(input_TH[-_ROWS:])

    for i, (layer, _) in enumerate(Blocks(checkpoint, texts).run(watch)):
        progress(f"calibrating block {i + 1} of {checkpoint.config.layers}")
        for name, seen in rows.items():
            factors_of_layers[f"layers.{i}.{name}"] = migrated(seen, layer.get_submodule(name).weight)  # type: ignore[arg-type]
        rows.clear()
    return {
        name: factor for name, factor in factors_of_layers.items() if not torch.equal(factor, torch.ones_like(factor))
    }
