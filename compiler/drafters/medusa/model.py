"""Medusa heads as a draft model: heads on the teacher's last hidden state, one graph for all trees."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar, cast

from draftwood import manifest as m
from draftwood.compiler.drafters.common.ranked import candidates, check_levels
from draftwood.compiler.drafters.medusa.cost import MedusaCost
from draftwood.compiler.drafters.medusa.network import MedusaHeads
from draftwood.compiler.drafters.medusa.steps import medusa_step
from draftwood.compiler.drafters.model import DraftModel, Lengths, Modules, Trees
from draftwood.compiler.drafters.widening import Axes, Widening
from draftwood.compiler.steps.step import Step, StepSizes
from draftwood.compiler.teachers.config import TeacherConfig
from draftwood.trees import Topology
from draftwood.trees.spec import Budget

_AXES: Axes = {
    "linear.weight": ("hidden", "hidden"),
    "linear.bias": ("hidden",),
    "weight": ("vocabulary", "hidden"),
}


@dataclass(frozen=True, slots=True)
class MedusaConfig:
    """Heads, residual blocks of each, and whether the teacher's output matrix serves them all."""

    heads: int
    blocks: int
    tied: bool
    # Whether blocks have a bias.
    bias: bool = True
    # Tokens that can be proposed; None for the teacher's vocabulary.
    vocabulary: int | None = None
    # Linear layers of the network that are W8A8.
    quantised: tuple[str, ...] = ()


@dataclass(frozen=True)
class MedusaModel(DraftModel):
    """Heads on the teacher's last hidden state."""

    kind: ClassVar[str] = "medusa"
    config: MedusaConfig

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
            layers=0,
            kv_heads=0,
            head_dim=0,
            config=asdict(self.config),
        )

    def widening(self) -> Widening | None:
        """A block x + silu(Wx + b) leaves the padding at zero when W and b are zero there, since silu(0) = 0; the
        columns of an output matrix that read the padding are zero."""
        plain = self.config.bias and self.config.vocabulary is None
        return Widening(axes=_AXES, fields=self._widened_fields) if plain else None

    def _widened_fields(self, fields: dict[str, Any], wide: TeacherConfig) -> dict[str, Any]:
        return {"medusa_num_heads": self.config.heads, "medusa_num_layers": self.config.blocks}

    def cost(self) -> MedusaCost:
        return MedusaCost(levels=self.config.heads, blocks=self.config.blocks, tied=self.config.tied)
