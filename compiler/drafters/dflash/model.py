"""DFlash as a drafter: one pass over a block of rows, whose one draft step serves all trees."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from draftwood.compiler.checkpoints.fields import Fields
from draftwood.compiler.drafters.common.checkpoint import Parts
from draftwood.compiler.drafters.common.model import CachedModel
from draftwood.compiler.drafters.common.vocabulary import Vocabulary
from draftwood.compiler.drafters.dflash.checkpoint import dflash_parts, is_dflash, read_dflash_config
from draftwood.compiler.drafters.dflash.network import DFlash, DFlashConfig
from draftwood.compiler.teachers.config import TeacherConfig


@dataclass(frozen=True)
class DFlashModel(CachedModel):
    """A block of rows that see each other."""

    kind: ClassVar[str] = "dflash"
    called: ClassVar[str] = "DFlash"
    config: DFlashConfig

    @classmethod
    def recognises(cls, path: Path, fields: Mapping[str, Any]) -> bool:
        return is_dflash(fields)

    @classmethod
    def read(
        cls, fields: Fields, teacher: TeacherConfig, stored: Collection[str]
    ) -> tuple[DFlashConfig, Vocabulary, Parts]:
        config, vocabulary = read_dflash_config(fields, teacher, stored)
        return config, vocabulary, dflash_parts(config, vocabulary)

    @property
    def levels(self) -> int:
        return self.config.levels

    def module(self, teacher: TeacherConfig, positions: int) -> DFlash:
        return DFlash(self.config, positions)
