"""By how much a quantised teacher differs from the original, on texts that its calibration has not seen."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from draftwood.compiler.quantisation.blocks import Blocks, State
from draftwood.compiler.teachers.checkpoint import Checkpoint

# N rows of all texts, H hidden


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherDifference:
    """Two teachers on the same texts, every token given."""

    texts: int
    tokens: int
    # exp of the mean negative log-probability of the token that follows, in natural units.
    perplexity: float
    original_perplexity: float
    # Share of positions at which both have the same best token.
    agreement: float
    # After every block, the size of the states' difference over that of the original's.
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
) -> TeacherDifference:
    """Runs both block by block, side by side, on texts of token ids int64 [T]."""
    return differences(original, {"": quantised}, texts, progress)[""]


def differences(
    original: Checkpoint, others: Mapping[str, Checkpoint], texts: Sequence[Tensor], progress: Callable[[str], None]
) -> dict[str, TeacherDifference]:
    """The difference of each of several teachers from the original, with one block of each in memory."""
    all_of = [Blocks(teacher, texts) for teacher in (original, *others.values())]
    errors: list[list[float]] = [[] for _ in others]
    states: list[list[State]] = []
    for i, blocks_of_all in enumerate(zip(*(blocks.run() for blocks in all_of), strict=True)):
        progress(f"comparing block {i + 1} of {original.config.layers}")
        states = [side for _, side in blocks_of_all]
        want_NH, *got = (torch.cat([state.total_TH for state in side]) for side in states)
        for error, got_NH in zip(errors, got, strict=True):
            error.append(float((got_NH - want_NH).norm() / want_NH.norm()))
    (want_N, best_N), *scored = (blocks.scores(side) for blocks, side in zip(all_of, states, strict=True))
    return {
        name: TeacherDifference(
            texts=len(texts),
            tokens=len(want_N),
            perplexity=float((-got_N).mean().exp()),
            original_perplexity=float((-want_N).mean().exp()),
            agreement=float((best_N == other_N).double().mean()),
            errors=tuple(error),
        )
        for name, error, (got_N, other_N) in zip(others, errors, scored, strict=True)
    }
