"""DSpark (2026, arXiv 2607.05147): DFlash's block with a sequential head of low rank and a confidence head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, get_args

import msgspec

from draftwood.compiler.drafters.common.options import AUX_LAYERS, NEGATIVES, SHARED_NOISE
from draftwood.compiler.drafters.kind import Kind, Option
from draftwood.errors import RequestError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import LlamaForCausalLM

    from draftwood.compiler.drafters.dspark.cost import DSparkCost
    from draftwood.compiler.drafters.dspark.model import DSparkModel
    from draftwood.compiler.drafters.dspark.training import DSparkStudent
    from draftwood.compiler.drafters.kind import Folder
    from draftwood.compiler.drafters.model import OpenedDrafter
    from draftwood.compiler.teachers.checkpoint import Checkpoint
    from draftwood.compiler.teachers.config import TeacherConfig


class DSparkKind(Kind):
    """DSpark as a kind."""

    name = "dspark"
    title = "a DSpark drafter"
    layout = "one with the config.json and the tensors of a DSpark drafter"
    follows_nodes = title
    options: ClassVar[Mapping[str, Option]] = {
        "levels": Option(help="rows of the block, each a level (5)", default=5, least=2),
        "layers": Option(help="layers of the block (1)", default=1, least=1),
        "aux_layers": AUX_LAYERS,
        "markov_rank": Option(help="rank of the sequential head (64)", default=64, value="N", least=1),
        "markov_head": Option(help="its kind: vanilla, gated or rnn (vanilla)", default="vanilla", read=str),
        "mask_token": Option(help="id that stands where no token is known (the teacher's bos)", value="ID", least=0),
        "negatives": NEGATIVES,
        "shared_noise": SHARED_NOISE,
    }
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

    def complete(self, options: Mapping[str, Any]) -> dict[str, Any]:
        from draftwood.compiler.drafters.dspark.config import Head

        chosen = super().complete(options)
        if chosen["markov_head"] not in get_args(Head):
            raise RequestError(f"markov_head is {chosen['markov_head']}; expected {', '.join(get_args(Head))}")
        return chosen

    def student(self, teacher: LlamaForCausalLM, options: Mapping[str, Any], ids_V: Tensor | None) -> DSparkStudent:
        from draftwood.compiler.drafters.dspark.training import begin

        return begin(teacher, options)

    def trained(
        self, folder: Path, teacher: LlamaForCausalLM, levels: int | None
    ) -> tuple[DSparkStudent, dict[str, Tensor]]:
        from draftwood.compiler.drafters.dspark.training import read_back

        return read_back(folder, teacher)

    def exported(
        self, opened: OpenedDrafter, teacher: Checkpoint, layout: str, tokens: int | None, verifier: str
    ) -> Folder:
        from draftwood.compiler.drafters.common.checkpoint import CachedCheckpoint
        from draftwood.compiler.drafters.dspark.export import exported

        assert isinstance(opened.checkpoint, CachedCheckpoint)
        return exported(opened.checkpoint, layout, tokens, verifier)

    def cost(self, sizes: Sequence[str], teacher: TeacherConfig) -> DSparkCost | None:
        from draftwood.compiler.drafters.dspark.cost import DSparkCost

        found = [int(size) for size in sizes if size.isdecimal() and int(size)]
        if len(found) != len(sizes) or not 1 <= len(found) <= 4:
            return None
        levels, layers, vocabulary, rank = (*found, *(1, 1, teacher.vocabulary, 256)[len(found) :])
        return DSparkCost(levels=levels, layers=layers, vocabulary=vocabulary, rank=rank)


DSPARK = DSparkKind()
