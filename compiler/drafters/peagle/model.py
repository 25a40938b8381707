"""P-EAGLE as a drafter: one pass, whose one draft step serves all trees.

It is published as EAGLE-3 folders with the tensor ``mask_hidden`` and a mask token.

============  =================================================  =============================  ====================
writer        how the folder is told from an EAGLE-3 drafter     mask token                     tokens a pass
============  =================================================  =============================  ====================
speculators   speculators_model_type peagle, PEagleSpeculator    mask_token_id                  speculators_config
SpecForge     PEagleDraftModel                                   not stored, to be added        8
Automodel     parallel_drafting in LlamaEagle3DraftModel         mask_token_id                  num_depths
Amazon        ptd_token_id (or pard_token)                       the same field                 8
============  =================================================  =============================  ====================
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from dataclasses import fields as fields_of
from pathlib import Path
from typing import Any, ClassVar

from draftwood.compiler.checkpoints.fields import Fields
from draftwood.compiler.drafters.common.checkpoint import Parts
from draftwood.compiler.drafters.common.config import read_mask_token
from draftwood.compiler.drafters.common.model import CachedModel
from draftwood.compiler.drafters.common.vocabulary import Vocabulary
from draftwood.compiler.drafters.eagle3.checkpoint import UNUSED, eagle3_parts, read_eagle3_config
from draftwood.compiler.drafters.eagle3.layouts import SPECFORGE, SPECULATORS, WRITERS, Spelling, read_writer
from draftwood.compiler.drafters.peagle.network import PEagle, PEagleConfig
from draftwood.compiler.teachers.config import TeacherConfig

OWN = {"PEagleDraftModel": SPECFORGE, "PEagleSpeculator": SPECULATORS}
# The default levels of its trainers (speculators and Automodel).
_USUAL_LEVELS = 8
_MOST_LEVELS = 64
_MARKS = ("parallel_drafting", "ptd_token_id", "pard_token")


def _levels(fields: Fields) -> int:
    """How many tokens a pass drafts: ``num_depths``, or the number that speculators proposes, or the usual one."""
    proposed = fields.get("speculators_config", {})
    methods = proposed.get("proposal_methods") if isinstance(proposed, dict) else None
    first = methods[0] if isinstance(methods, list) and methods and isinstance(methods[0], dict) else {}
    usual = Fields(fields.path, first).whole("speculative_tokens", _USUAL_LEVELS)
    levels = fields.whole("num_depths", usual)
    if not 1 <= levels <= _MOST_LEVELS:
        fields.fail("num_depths", f"1 to {_MOST_LEVELS} tokens a pass; found {levels}")
    return levels


@dataclass(frozen=True)
class PEagleModel(CachedModel):
    """EAGLE-3's network with a mask row a level."""

    kind: ClassVar[str] = "peagle"
    called: ClassVar[str] = "P-EAGLE"
    unused: ClassVar[tuple[str, ...]] = UNUSED
    config: PEagleConfig

    @classmethod
    def recognises(cls, path: Path, fields: Mapping[str, Any]) -> bool:
        named = fields.get("architectures") in [[name] for name in OWN]
        marked = any(fields.get(name) not in (None, False) for name in _MARKS)
        return named or marked or fields.get("speculators_model_type") == "peagle"

    @classmethod
    def read(
        cls, fields: Fields, teacher: TeacherConfig, stored: Collection[str]
    ) -> tuple[PEagleConfig, Vocabulary, Parts]:
        writer = read_writer(fields, {**WRITERS, **OWN}, "peagle")
        eagle3, vocabulary = read_eagle3_config(fields, writer, teacher, stored)
        config = PEagleConfig(
            **{field.name: getattr(eagle3, field.name) for field in fields_of(eagle3)},
            mask_token=read_mask_token((fields, fields.nested("dflash_config")), teacher),
            levels=_levels(fields),
        )
        parts = eagle3_parts(config, vocabulary, Spelling.of(stored))
        return config, vocabulary, parts | {"mask_hidden": (("mask_hidden", (1, 1, config.features)),)}

    @property
    def levels(self) -> int:
        return self.config.levels

    def module(self, teacher: TeacherConfig, positions: int) -> PEagle:
        return PEagle(self.config, positions)
