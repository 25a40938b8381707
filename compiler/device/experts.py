"""What a mixture of experts costs: the experts that the rows of a step touch are read, the others are not.

One row reads K of E experts; the rows of a tree choose for themselves, so a step of many rows reads nearly all of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from draftwood.compiler.device.constants import FRACTAL_ROWS
from draftwood.compiler.device.operators import BYTES, Op, copy, elementwise, matmul
from draftwood.compiler.teachers.experts import MixtureConfig
from draftwood.errors import RequestError

# T rows, E experts, K of them chosen by a row, H hidden, I width of an expert


@dataclass(frozen=True, slots=True)
class ExpertLoads:
    """How many experts of a layer a step touches, by its rows; between measured rows in a straight line.

    Without measurements every row chooses K of E by itself and evenly, which is the most that independent rows touch:
    E x (1 - (1 - K / E)^T). Rows of one text resemble each other, so measured loads are lower.
    """

    experts: int
    per_token: int
    measured: Mapping[int, float] | None = None

    def touched(self, rows: int) -> float:
        """Experts that some of so many rows have chosen, from K to E."""
        if self.measured is None:
            return self.experts * (1.0 - (1.0 - self.per_token / self.experts) ** rows)
        known = sorted(self.measured)
        return float(np.interp(rows, known, [self.measured[row] for row in known]))

    @property
    def facts(self) -> dict[str, object]:
        """As a latency table has it; what was measured, by rows."""
        found = None if self.measured is None else {str(rows): self.measured[rows] for rows in sorted(self.measured)}
        return {"experts": self.experts, "per_token": self.per_token, "measured": found}


def expert_loads(config: MixtureConfig, measured: Mapping[int, float] | None = None) -> ExpertLoads:
    """RequestError where what was measured is of other experts, or of no rows."""
    least, most = config.experts_per_token, config.experts
    for rows, touched in (measured or {}).items():
        if rows < 1 or not least <= touched <= most:
            raise RequestError(
                f"expert loads: {touched} experts at {rows} rows; expected {least} to {most} at 1 row or more; measure"
                " them with this teacher"
            )
    return ExpertLoads(config.experts, config.experts_per_token, measured)


def mixture_ops(config: MixtureConfig, rows: int, loads: ExpertLoads) -> list[Op]:
    """The MLP of a layer, an entry a kernel of its graph."""
    H, I, places = config.hidden, config.expert_intermediate, rows * config.experts_per_token  # noqa: E741
    touched = min(loads.touched(rows), places)
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
    padded = math.ceil(rows / touched / FRACTAL_ROWS.value) * FRACTAL_ROWS.value * touched
    memory = BYTES * (touched * inner * outer + rows * (inner + outer))
    return Op(name=name, engine="matmul", memory=memory, cube=2.0 * padded * inner * outer)
