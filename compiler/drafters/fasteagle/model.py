"""FastEagle as a drafter: a cascade of blocks, one a level, in one pass; one draft step serves all trees.

The layout of its folder is ours, since none is published:

* config.json: ``architectures`` ["FastEagleDrafter"], ``model_type`` "fasteagle", ``num_hidden_layers`` N, a Llama's
  fields for the blocks, ``draft_vocab_size``, ``target_hidden_size``, and ``aux_layer_ids``, the teacher's layers whose
  entering states are read.
* Tensors: ``fc.weight`` [H, n * target_hidden_size] of n states; ``proj.weight`` [H, 2H] over cat(fused states,
  embedding). ``layers.{i}.*`` as a Llama's; ``norm.weight``. ``lm_head.weight`` [draft_vocab_size, H] unless it is the
  teacher's; ``d2t`` and ``t2d`` as EAGLE-3 has them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from draftwood.compiler.checkpoints.fields import Fields
from draftwood.compiler.drafters.common.checkpoint import Parts, block_parts, end_parts
from draftwood.compiler.drafters.common.config import (
    CachedConfig,
    check_aux_layers,
    read_block,
    read_target,
    read_window,
)
from draftwood.compiler.drafters.common.model import CachedModel
from draftwood.compiler.drafters.common.vocabulary import Vocabulary, read_vocabulary
from draftwood.compiler.drafters.fasteagle.network import FastEagle
from draftwood.compiler.teachers.config import TeacherConfig


def _parts(config: CachedConfig, vocabulary: Vocabulary) -> Parts:
    hidden = config.block.hidden
    parts: Parts = {
        "fc.weight": (("fc.weight", (hidden, config.features)),),
        "proj.weight": (("proj.weight", (hidden, 2 * hidden)),),
    }
    for i in range(config.block.layers):
        parts |= block_parts(config.block, f"cascade.{i}", f"layers.{i}", hidden)
    return parts | end_parts(config, vocabulary)


@dataclass(frozen=True)
class FastEagleModel(CachedModel):
    """A cascade of blocks, one a level."""

    kind: ClassVar[str] = "fasteagle"
    called: ClassVar[str] = "FastEagle"
    training: ClassVar[str | None] = "draftwood.compiler.drafters.fasteagle.training"
    config: CachedConfig

    @classmethod
    def recognises(cls, path: Path, fields: Mapping[str, Any]) -> bool:
        return fields.get("architectures") == ["FastEagleDrafter"]

    @classmethod
    def read(
        cls, fields: Fields, teacher: TeacherConfig, stored: Collection[str]
    ) -> tuple[CachedConfig, Vocabulary, Parts]:
        for name, expected in (("architectures", ["FastEagleDrafter"]), ("model_type", "fasteagle")):
            if fields.get(name) != expected:
                fields.fail(name, f"{expected!r}, a FastEagle drafter")
        block = read_block(fields, teacher, max(fields.whole("num_hidden_layers"), 1), ("fasteagle",))
        if block.hidden != teacher.hidden:
            fields.fail("hidden_size", f"{teacher.hidden} as the teacher has, whose embedding the drafter reads")
        vocabulary = read_vocabulary(fields, fields, teacher)
        config = CachedConfig(
            block=block,
            target_hidden=read_target(fields, teacher, block.hidden),
            aux_layers=check_aux_layers(fields, "aux_layer_ids", fields.tokens("aux_layer_ids", None), teacher),
            draft_vocabulary=vocabulary.draft,
            own_embedding=False,
            tied_head="lm_head.weight" not in stored,
            window=read_window(fields, block.layers),
        )
        return config, vocabulary, _parts(config, vocabulary)

    @property
    def levels(self) -> int:
        return self.config.block.layers

    def module(self, teacher: TeacherConfig, positions: int) -> FastEagle:
        return FastEagle(self.config, positions)
