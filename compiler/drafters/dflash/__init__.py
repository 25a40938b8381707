"""DFlash (2026, arXiv 2602.06036): a block of rows over the text, denoised in one pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from draftwood.compiler.drafters.kind import Kind

if TYPE_CHECKING:
    from draftwood.compiler.drafters.dflash.cost import DFlashCost
    from draftwood.compiler.drafters.dflash.model import DFlashModel
    from draftwood.compiler.drafters.kind import Folder
    from draftwood.compiler.drafters.model import OpenedDrafter
    from draftwood.compiler.teachers.checkpoint import Checkpoint
    from draftwood.compiler.teachers.config import TeacherConfig


class DFlashKind(Kind):
    """DFlash as a kind."""

    name = "dflash"
    title = "a DFlash drafter"
    layout = "one with the config.json and the tensors of a DFlash drafter"
    cost_sizes = ":LEVELS[:LAYERS[:VOCABULARY]]"

    def recognises(self, path: Path, fields: Mapping[str, Any]) -> bool:
        from draftwood.compiler.drafters.dflash.config import is_dflash

        return is_dflash(fields)

    def open(self, path: Path, teacher: Checkpoint) -> OpenedDrafter:
        from draftwood.compiler.drafters.dflash.checkpoint import open_dflash
        from draftwood.compiler.drafters.dflash.model import DFlashModel
        from draftwood.compiler.drafters.model import OpenedDrafter

        opened = open_dflash(path, teacher)
        return OpenedDrafter(DFlashModel(opened.config), opened)

    def model(self, config: Mapping[str, Any]) -> DFlashModel:
        from draftwood.compiler.drafters.dflash.config import DFlashConfig
        from draftwood.compiler.drafters.dflash.model import DFlashModel

        return DFlashModel(msgspec.convert(config, DFlashConfig))

    def exported(
        self, opened: OpenedDrafter, teacher: Checkpoint, layout: str, tokens: int | None, verifier: str
    ) -> Folder:
        from draftwood.compiler.drafters.common.checkpoint import CachedCheckpoint
        from draftwood.compiler.drafters.dflash.export import exported

        assert isinstance(opened.checkpoint, CachedCheckpoint)
        return exported(opened.checkpoint, layout, tokens, verifier)

    def cost(self, sizes: Sequence[str], teacher: TeacherConfig) -> DFlashCost | None:
        from draftwood.compiler.drafters.dflash.cost import DFlashCost

        found = [int(size) for size in sizes if size.isdecimal() and int(size)]
        if len(found) != len(sizes) or not 1 <= len(found) <= 3:
            return None
        usual = (1, 1, teacher.vocabulary)
        levels, layers, vocabulary = (*found, *usual[len(found) :])
        return DFlashCost(levels=levels, layers=layers, vocabulary=vocabulary)


DFLASH = DFlashKind()
