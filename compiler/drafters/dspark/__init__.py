"""DSpark (2026, arXiv 2607.05147): DFlash's block with a sequential head of low rank and a confidence head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from draftwood.compiler.drafters.kind import Kind

if TYPE_CHECKING:
    from draftwood.compiler.drafters.dspark.cost import DSparkCost
    from draftwood.compiler.drafters.dspark.model import DSparkModel
    from draftwood.compiler.drafters.model import OpenedDrafter
    from draftwood.compiler.teachers.checkpoint import Checkpoint
    from draftwood.compiler.teachers.config import TeacherConfig


class DSparkKind(Kind):
    """DSpark as a kind."""

    name = "dspark"
    title = "a DSpark drafter"
    layout = "one with the config.json and the tensors of a DSpark drafter"
    follows_nodes = title
    cost_sizes = ":LEVELS[:LAYERS[:VOCABULARY[:RANK]]]"

    def recognises(self, path: Path, fields: Mapping[str, Any]) -> bool:
        from draftwood.compiler.drafters.dspark.config import is_dspark

        return is_dspark(fields)

    def open(self, path: Path, teacher: Checkpoint) -> OpenedDrafter:
        from draftwood.compiler.drafters.dspark.checkpoint import open_dspark
        from draftwood.compiler.drafters.dspark.model import DSparkModel
        from draftwood.compiler.drafters.model import OpenedDrafter

        opened = open_dspark(path, teacher)
        return OpenedDrafter(DSparkModel(opened.config), opened)

    def model(self, config: Mapping[str, Any]) -> DSparkModel:
        from draftwood.compiler.drafters.dspark.config import DSparkConfig
        from draftwood.compiler.drafters.dspark.model import DSparkModel

        return DSparkModel(msgspec.convert(config, DSparkConfig))

    def cost(self, sizes: Sequence[str], teacher: TeacherConfig) -> DSparkCost | None:
        from draftwood.compiler.drafters.dspark.cost import DSparkCost

        found = [int(size) for size in sizes if size.isdecimal() and int(size)]
        if len(found) != len(sizes) or not 1 <= len(found) <= 4:
            return None
        levels, layers, vocabulary, rank = (*found, *(1, 1, teacher.vocabulary, 256)[len(found) :])
        return DSparkCost(levels=levels, layers=layers, vocabulary=vocabulary, rank=rank)


DSPARK = DSparkKind()
