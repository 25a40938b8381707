"""The cost of drafters that draft a block of levels in one pass, as far as their sizes say it alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from draftwood.compiler.device.table import DraftCost, whole_sizes
from draftwood.compiler.teachers.config import TeacherConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCost(DraftCost):
    """Levels, layers and the draft head's vocabulary, and the teacher's states that are read."""

    levels: int
    layers: int
    vocabulary: int
    states: int

    @classmethod
    def of_sizes(cls, sizes: Sequence[str], teacher: TeacherConfig) -> Self | None:
        if (numbers := whole_sizes(sizes, (1, teacher.vocabulary))) is None:
            return None
        return cls(**dict(zip(("levels", "layers", "vocabulary"), numbers, strict=True)))

    @classmethod
    def of_config(cls, config: Any) -> Self:
        return cls(
            levels=config.levels, layers=config.block.layers, vocabulary=config.draft_vocabulary,
            states=len(config.aux_layers), **cls.more(config),
        )  # fmt: skip

    @classmethod
    def more(cls, config: Any) -> dict[str, int]:
        """Sizes that a kind has besides."""
        return {}
