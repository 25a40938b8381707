"""Medusa heads (Cai et al., 2024, arXiv 2401.10774): one guess a level, all from the teacher's last hidden state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from draftwood.compiler.drafters.common.options import SHARED_NOISE
from draftwood.compiler.drafters.kind import Kind, Option
from draftwood.errors import RequestError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import LlamaForCausalLM

    from draftwood.compiler.drafters.kind import Folder
    from draftwood.compiler.drafters.medusa.checkpoint import MedusaCheckpoint
    from draftwood.compiler.drafters.medusa.cost import MedusaCost
    from draftwood.compiler.drafters.medusa.model import MedusaModel
    from draftwood.compiler.drafters.medusa.training import MedusaStudent
    from draftwood.compiler.drafters.model import OpenedDrafter
    from draftwood.compiler.teachers.checkpoint import Checkpoint
    from draftwood.compiler.teachers.config import TeacherConfig


class MedusaKind(Kind):
    """Medusa heads as a kind."""

    name = "medusa"
    title = "Medusa heads"
    layout = "a folder with medusa_lm_head.safetensors or medusa_lm_head.pt, or with the config.json of a Medusa model"
    weights_file = "medusa_lm_head.safetensors"
    described_by = "medusa_num_heads"
    options: ClassVar[Mapping[str, Option]] = {
        "levels": Option(help="heads (4)", default=4, least=1),
        "blocks": Option(help="residual blocks a head (1)", default=1, least=0),
        "shared_noise": SHARED_NOISE,
        "own_output": Option(help="train an output matrix, do not share the teacher's", default=False, read=None),
    }
    cost_sizes = ":HEADS[:tied]"

    def recognises(self, path: Path, fields: Mapping[str, Any]) -> bool:
        from draftwood.compiler.drafters.medusa.layouts import MEDUSA_FILES, is_vllm

        named = path.name in MEDUSA_FILES or any((path / name).is_file() for name in MEDUSA_FILES)
        # Published files have other names as well; a file without a config.json can be nothing else.
        return named or (path.is_file() and not fields) or "medusa_num_heads" in fields or is_vllm(fields)

    def open(self, path: Path, teacher: Checkpoint) -> OpenedDrafter:
        from draftwood.compiler.drafters.medusa.checkpoint import MedusaCheckpoint
        from draftwood.compiler.drafters.medusa.layouts import check_base

        opened = MedusaCheckpoint.open(path, teacher.config)
        if opened.whole:
            check_base(path, teacher)
        return _opened(opened)

    def describe(self, path: Path) -> OpenedDrafter:
        from draftwood.compiler.drafters.medusa.checkpoint import MedusaCheckpoint

        return _opened(MedusaCheckpoint.describe(path))

    def model(self, config: Mapping[str, Any]) -> MedusaModel:
        from draftwood.compiler.drafters.medusa.model import MedusaConfig, MedusaModel

        return MedusaModel(msgspec.convert(config, MedusaConfig))

    def student(self, teacher: LlamaForCausalLM, options: Mapping[str, Any], ids_V: Tensor | None) -> MedusaStudent:
        from draftwood.compiler.drafters.medusa.training import MedusaStudent

        if options["shared_noise"] and options["own_output"]:
            raise RequestError("--shared-noise and --own-output: a draw is learnt by the teacher's matrix; drop one")
        student = MedusaStudent(teacher, options["levels"], options["blocks"], options["own_output"])
        student.shared_noise = options["shared_noise"]
        return student

    def trained(
        self, folder: Path, teacher: LlamaForCausalLM, levels: int | None
    ) -> tuple[MedusaStudent, dict[str, Tensor]]:
        from draftwood.compiler.drafters.medusa.checkpoint import MedusaCheckpoint
        from draftwood.compiler.drafters.medusa.training import MedusaStudent
        from draftwood.compiler.teachers.registry import read_config

        opened = MedusaCheckpoint.open(folder, read_config(Path(str(teacher.name_or_path))))
        config = opened.config
        student = MedusaStudent(teacher, config.heads, config.blocks, not config.tied)
        return student, {f"model.{name}": opened.weight(name) for name in opened.names()}

    def exported(
        self, opened: OpenedDrafter, teacher: Checkpoint, layout: str, tokens: int | None, verifier: str
    ) -> Folder:
        from draftwood.compiler.drafters.medusa.checkpoint import MedusaCheckpoint
        from draftwood.compiler.drafters.medusa.export import exported

        assert isinstance(opened.checkpoint, MedusaCheckpoint)
        return exported(opened.checkpoint, teacher, layout, verifier)

    def cost(self, sizes: Sequence[str], teacher: TeacherConfig) -> MedusaCost | None:
        from draftwood.compiler.drafters.medusa.cost import MedusaCost

        match sizes:
            case [heads] | [heads, "tied"] if heads.isdecimal() and int(heads):
                return MedusaCost(levels=int(heads), tied="tied" in sizes)
        return None


def _opened(heads: MedusaCheckpoint) -> OpenedDrafter:
    from draftwood.compiler.drafters.medusa.model import MedusaModel
    from draftwood.compiler.drafters.model import OpenedDrafter

    return OpenedDrafter(MedusaModel(heads.config), heads)


MEDUSA = MedusaKind()
