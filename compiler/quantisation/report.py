"""By how much a quantised teacher differs from the original, on texts that its calibration has not seen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from draftwood.compiler.quantisation.blocks import Blocks, State
from draftwood.compiler.teachers.checkpoint import Checkpoint

# N rows of all texts, H hidden


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Two teachers on the same texts, every token given."""

    texts: int
    tokens: int
    # exp of the mean negative log-probability of the token that follows, in natural units.
    perplexity: float
    original_perplexity: float
    # Share of positions at which both have the same best token.
    agreement: float
    # Behind every block, the size of the states' difference over that of the original's.
    errors: tuple[float, ...]

    @property
    def worse(self) -> float:
        """By what share the perplexity is higher."""
        return self.perplexity / self.original_perplexity - 1

    def figures(self) -> dict[str, Any]:
        """All of it by name, for JSON."""
        return {**asdict(self), "worse": self.worse}


def difference(
    original: Checkpoint, quantised: Checkpoint, texts: Sequence[Tensor], progress: Callable[[str], None]
) -> Difference:
    """Runs both block by block, side by side, on texts of token ids int64 [T]."""
    pair, errors = (Blocks(original, texts), Blocks(quantised, texts)), []
    states: tuple[list[State], list[State]] = ([], [])
    for i, ((_, one), (_, other)) in enumerate(zip(pair[0].run(), pair[1].run(), strict=True)):
        progress(f"comparing block {i + 1} of {original.config.layers}")
        want_NH, got_NH = (torch.cat([state.total_TH for state in side]) for side in (one, other))
        errors.append(float((got_NH - want_NH).norm() / want_NH.norm()))
        states = (one, other)
    (want_N, best_N), (got_N, other_N) = (blocks.scores(side) for blocks, side in zip(pair, states, strict=True))
    return Difference(
        texts=len(texts),
        tokens=len(want_N),
        perplexity=float((-got_N).mean().exp()),
        original_perplexity=float((-want_N).mean().exp()),
        agreement=float((best_N == other_N).double().mean()),
        errors=tuple(errors),
    )
