"""The cost of a mixture of experts: the experts that the rows of a step touch are read, the others are not.

One row reads K of E experts. The rows of a tree choose for themselves, so a step of many rows reads nearly all of them.
"""

from __future__ import annotations

import math
from dataclasses import replace

from draftwood.compiler.device.constants import FRACTAL_ROWS
from draftwood.compiler.device.operators import BYTES, Op, copy, elementwise, matmul
from draftwood.compiler.teachers.experts import MixtureConfig

# T rows, E experts, K of them chosen by a row, H hidden, I width of an expert


def touched_experts(config: MixtureConfig, rows: int) -> float:
    """Experts of a layer that some of the rows choose, from K to E: E x (1 - (1 - K / E)^T).

    Every row is assumed to choose by itself and evenly, which is the most that rows touch. Rows of one text resemble
    each other and touch fewer.
    """
    return config.experts * (1.0 - (1.0 - config.experts_per_token / config.experts) ** rows)


def mixture_ops(config: MixtureConfig, rows: int) -> list[Op]:
    """The MLP of a layer, an entry a kernel of its graph."""
    H, I, places = config.hidden, config.expert_intermediate, rows * config.experts_per_token  # noqa: E741
    touched = min(touched_experts(config, rows), places)
    shares = [elementwise("shares", places, 2, count=2)] if config.shares_normalised else []
    return [
        matmul("router", rows, H, config.experts),
        elementwise("gating", rows * config.experts, 1),
        *shares,
        copy("rows by expert", places * H),
        _grouped("experts gate up", places, touched, H, 2 * I),
        elementwise("swiglu", places * I, 3),
        _grouped("experts down", places, touched, I, H),
        replace(elementwise("weighed sum", places * H, 1), result=float(BYTES * rows * H)),
    ]


def _grouped(name: str, rows: int, touched: float, inner: int, outer: int) -> Op:
    """Every touched expert's matrix is streamed once, and its rows are padded to fractals."""
    # Fewer experts than all are touched by a hair even if rows are many: a hair is no fractal of its own.
    fractals = math.ceil(rows / touched / FRACTAL_ROWS.value - 1e-3)
    padded = fractals * FRACTAL_ROWS.value * touched
    memory = BYTES * (touched * inner * outer + rows * (inner + outer))
    return Op(name=name, engine="matmul", memory=memory, cube=2.0 * padded * inner * outer)
