"""EAGLE-3 (Li et al., 2025, arXiv 2503.01840): one block over states inside the teacher, run once a level."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from draftwood.compiler.drafters.common.options import AUX_LAYERS, DRAFT_VOCABULARY, SHARED_NOISE
from draftwood.compiler.drafters.kind import Kind, Option

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import LlamaForCausalLM

    from draftwood.compiler.drafters.eagle3.cost import Eagle3Cost
    from draftwood.compiler.drafters.eagle3.model import Eagle3Model
    from draftwood.compiler.drafters.eagle3.training import Eagle3Student
    from draftwood.compiler.drafters.kind import Folder
    from draftwood.compiler.drafters.model import OpenedDrafter
    from draftwood.compiler.teachers.checkpoint import Checkpoint
    from draftwood.compiler.teachers.config import TeacherConfig


class Eagle3Kind(Kind):
    """EAGLE-3 as a kind."""

    name = "eagle3"
    title = "an EAGLE-3 drafter"
    layout = "one with the config.json and the tensors of an EAGLE-3 drafter"
    follows_nodes = title
    options: ClassVar[Mapping[str, Option]] = {
        "levels": Option(help="steps of the training-time test (7)", default=7, least=1),
        "aux_layers": AUX_LAYERS,
        "draft_vocab": DRAFT_VOCABULARY,
        "shared_noise": SHARED_NOISE,
        "own_output": Option(help="train an output matrix, do not share the teacher's", default=False, read=None),
    }
    cost_sizes = "[:VOCABULARY]"

    def recognises(self, path: Path, fields: Mapping[str, Any]) -> bool:
        from draftwood.compiler.drafters.eagle3.layouts import OTHERS, WRITERS

        # Those that are not read are refused by their names.
        return fields.get("architectures") in [[name] for name in (*WRITERS, *OTHERS)]

    def open(self, path: Path, teacher: Checkpoint) -> OpenedDrafter:
        from draftwood.compiler.drafters.eagle3.checkpoint import open_eagle3
        from draftwood.compiler.drafters.eagle3.model import Eagle3Model
        from draftwood.compiler.drafters.model import OpenedDrafter

        opened = open_eagle3(path, teacher)
        return OpenedDrafter(Eagle3Model(opened.config), opened)

    def model(self, config: Mapping[str, Any]) -> Eagle3Model:
        from draftwood.compiler.drafters.eagle3.config import Eagle3Config
        from draftwood.compiler.drafters.eagle3.model import Eagle3Model

        return Eagle3Model(msgspec.convert(config, Eagle3Config))

    def student(self, teacher: LlamaForCausalLM, options: Mapping[str, Any], ids_V: Tensor | None) -> Eagle3Student:
        from draftwood.compiler.drafters.eagle3.training import begin

        return begin(teacher, options, ids_V)

    def trained(
        self, folder: Path, teacher: LlamaForCausalLM, levels: int | None
    ) -> tuple[Eagle3Student, dict[str, Tensor]]:
        from draftwood.compiler.drafters.eagle3.training import read_back

        return read_back(folder, teacher, levels or self.options["levels"].default)

    def exported(
        self, opened: OpenedDrafter, teacher: Checkpoint, layout: str, tokens: int | None, verifier: str
    ) -> Folder:
        from draftwood.compiler.drafters.common.checkpoint import CachedCheckpoint
        from draftwood.compiler.drafters.eagle3.export import exported

        assert isinstance(opened.checkpoint, CachedCheckpoint)
        return exported(opened.checkpoint, layout, tokens, verifier)

    def cost(self, sizes: Sequence[str], teacher: TeacherConfig) -> Eagle3Cost | None:
        from draftwood.compiler.drafters.eagle3.cost import Eagle3Cost

        match [int(size) for size in sizes if size.isdecimal() and int(size)]:
            case [] | [_] as found if len(found) == len(sizes):
                return Eagle3Cost(vocabulary=(*found, teacher.vocabulary)[0])
        return None


EAGLE3 = Eagle3Kind()
