"""Medusa heads as a drafter: heads on the teacher's last hidden state, one graph for all trees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

from draftwood import manifest as m
from draftwood.compiler.drafters.common.ranked import candidates, check_levels
from draftwood.compiler.drafters.medusa.checkpoint import MedusaCheckpoint, vllm
from draftwood.compiler.drafters.medusa.layouts import MEDUSA_FILES, check_base, heads_file, is_vllm
from draftwood.compiler.drafters.medusa.network import MedusaConfig, MedusaHeads, medusa_step
from draftwood.compiler.drafters.model import DraftModel, Lengths, Modules, OpenedDrafter, Trees
from draftwood.compiler.steps.step import Step, StepSizes
from draftwood.compiler.teachers.checkpoint import Checkpoint
from draftwood.compiler.teachers.config import TeacherConfig
from draftwood.trees import Topology
from draftwood.trees.spec import Budget


@dataclass(frozen=True)
class MedusaModel(DraftModel):
    """Heads on the teacher's last hidden state."""

    kind: ClassVar[str] = "medusa"
    called: ClassVar[str] = "Medusa"
    training: ClassVar[str | None] = "draftwood.compiler.drafters.medusa.training"
    weights_file: ClassVar[str] = "medusa_lm_head.safetensors"
    described_by: ClassVar[str | None] = "medusa_num_heads"
    layouts = {"vllm": vllm}  # noqa: RUF012 (declared by DraftModel)
    config: MedusaConfig

    @classmethod
    def recognises(cls, path: Path, fields: Mapping[str, Any]) -> bool:
        named = path.name in MEDUSA_FILES or heads_file(path) is not None
        # Published files have other names as well; a file without a config.json can be nothing else.
        return named or (path.is_file() and not fields) or "medusa_num_heads" in fields or is_vllm(fields)

    @classmethod
    def open(cls, path: Path, teacher: Checkpoint) -> OpenedDrafter:
        opened = MedusaCheckpoint.open(path, teacher.config)
        if opened.whole:
            check_base(path, teacher)
        return OpenedDrafter(cls(opened.config), opened)

    @classmethod
    def describe(cls, path: Path, teacher: Checkpoint) -> OpenedDrafter:
        if heads_file(path):  # counts blocks and output matrices, of which config.json says less
            return cls.open(path, teacher)
        heads = MedusaCheckpoint.describe(path)
        return OpenedDrafter(cls(heads.config), heads)

    def module(self, teacher: TeacherConfig, positions: int) -> MedusaHeads:
        heads = self.config
        sizes = (teacher.hidden, teacher.vocabulary, heads.heads, heads.blocks)
        return MedusaHeads(*sizes, heads.tied, heads.bias, heads.vocabulary)

    def check_tree(self, name: str, tree: Topology | Budget, teacher: TeacherConfig) -> None:
        check_levels(name, tree, self.config.heads, "heads", self._vocabulary(teacher))

    def rows_read(self, path_rows: int) -> int:
        return 1

    def _vocabulary(self, teacher: TeacherConfig) -> int:
        return self.config.vocabulary or teacher.vocabulary

    def draft_name(self, tree: str) -> str:
        return "draft"

    def steps(self, modules: Modules, trees: Trees, sizes: StepSizes, lengths: Lengths) -> list[Step]:
        decoder, heads = modules
        ranked = candidates(trees, self._vocabulary(decoder.config))
        return [medusa_step(cast(MedusaHeads, heads), decoder, ranked, sizes.dtype)]

    def manifest(self, digest: str, teacher: TeacherConfig, trees: Trees) -> m.Drafter:
        return m.Drafter(
            kind=self.kind,
            digest=digest,
            levels=self.config.heads,
            candidates=candidates(trees, self._vocabulary(teacher)),
            features=teacher.hidden,
            buffers=(),
            config=asdict(self.config),
        )
