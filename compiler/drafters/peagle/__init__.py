"""P-EAGLE (2026, arXiv 2602.01469): EAGLE-3 whose levels are all drafted in one pass, behind a mask token each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from draftwood.compiler.drafters.kind import Kind

if TYPE_CHECKING:
    from draftwood.compiler.drafters.kind import Folder
    from draftwood.compiler.drafters.model import OpenedDrafter
    from draftwood.compiler.drafters.peagle.cost import PEagleCost
    from draftwood.compiler.drafters.peagle.model import PEagleModel
    from draftwood.compiler.teachers.checkpoint import Checkpoint
    from draftwood.compiler.teachers.config import TeacherConfig


class PEagleKind(Kind):
    """P-EAGLE as a kind."""

    name = "peagle"
    title = "a P-EAGLE drafter"
    layout = "one with the config.json and the tensors of a P-EAGLE drafter"
    cost_sizes = ":LEVELS[:LAYERS[:VOCABULARY]]"

    def recognises(self, path: Path, fields: Mapping[str, Any]) -> bool:
        from draftwood.compiler.drafters.peagle.checkpoint import is_peagle

        return is_peagle(fields)

    def open(self, path: Path, teacher: Checkpoint) -> OpenedDrafter:
        from draftwood.compiler.drafters.model import OpenedDrafter
        from draftwood.compiler.drafters.peagle.checkpoint import open_peagle
        from draftwood.compiler.drafters.peagle.model import PEagleModel

        opened = open_peagle(path, teacher)
        return OpenedDrafter(PEagleModel(opened.config), opened)

    def model(self, config: Mapping[str, Any]) -> PEagleModel:
        from draftwood.compiler.drafters.peagle.config import PEagleConfig
        from draftwood.compiler.drafters.peagle.model import PEagleModel

        return PEagleModel(msgspec.convert(config, PEagleConfig))

    def exported(
        self, opened: OpenedDrafter, teacher: Checkpoint, layout: str, tokens: int | None, verifier: str
    ) -> Folder:
        from draftwood.compiler.drafters.common.checkpoint import CachedCheckpoint
        from draftwood.compiler.drafters.peagle.export import exported

        assert isinstance(opened.checkpoint, CachedCheckpoint)
        return exported(opened.checkpoint, layout, tokens, verifier)

    def cost(self, sizes: Sequence[str], teacher: TeacherConfig) -> PEagleCost | None:
        from draftwood.compiler.drafters.peagle.cost import PEagleCost

        found = [int(size) for size in sizes if size.isdecimal() and int(size)]
        if len(found) != len(sizes) or not 1 <= len(found) <= 3:
            return None
        usual = (1, 1, teacher.vocabulary)
        levels, layers, vocabulary = (*found, *usual[len(found) :])
        return PEagleCost(levels=levels, layers=layers, vocabulary=vocabulary)


PEAGLE = PEagleKind()
