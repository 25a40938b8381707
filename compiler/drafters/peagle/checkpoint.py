"""P-EAGLE drafters as people publish them: EAGLE-3 folders with the tensor ``mask_hidden`` and a mask token.

============  =================================================  =============================  ====================
writer        how the folder is told from an EAGLE-3 drafter     mask token                     tokens a pass
============  =================================================  =============================  ====================
speculators   speculators_model_type peagle, PEagleSpeculator    mask_token_id                  speculators_config
SpecForge     PEagleDraftModel                                   not stored, to be added        8
Automodel     parallel_drafting beside LlamaEagle3DraftModel     mask_token_id                  num_depths
Amazon        ptd_token_id (or pard_token)                       the same field                 8
============  =================================================  =============================  ====================
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields as fields_of
from pathlib import Path
from typing import Any

from draftwood.compiler.checkpoints.fields import Fields, read_json
from draftwood.compiler.drafters.common.checkpoint import CachedCheckpoint, fitting_checkpoint
from draftwood.compiler.drafters.common.mask_token import read_mask_token
from draftwood.compiler.drafters.eagle3.checkpoint import eagle3_parts, open_used
from draftwood.compiler.drafters.eagle3.config import Eagle3Config, read_eagle3_config
from draftwood.compiler.drafters.eagle3.layouts import SPECFORGE, SPECULATORS, WRITERS, Spelling, read_writer
from draftwood.compiler.drafters.peagle.config import PEagleConfig, read_levels
from draftwood.compiler.teachers.checkpoint import Checkpoint

OWN = {"PEagleDraftModel": SPECFORGE, "PEagleSpeculator": SPECULATORS}
_MARKS = ("parallel_drafting", "ptd_token_id", "pard_token")


def is_peagle(fields: Mapping[str, Any]) -> bool:
    """Whether a config.json is a P-EAGLE drafter's."""
    own = fields.get("architectures") in [[name] for name in OWN]
    marked = any(fields.get(name) not in (None, False) for name in _MARKS)
    return own or marked or fields.get("speculators_model_type") == "peagle"


def open_peagle(path: Path, teacher: Checkpoint) -> CachedCheckpoint[PEagleConfig]:
    """Opens a folder with config.json and model.safetensors, shards or pytorch_model.bin, or such a file in it.

    Raises:
        CheckpointError: as for an EAGLE-3 drafter; or there is no mask token.
    """
    stored = open_used(path, "P-EAGLE")
    fields = Fields(stored.folder / "config.json", read_json(stored.folder / "config.json"))
    writer = read_writer(fields, {**WRITERS, **OWN}, "peagle")
    eagle3, vocabulary = read_eagle3_config(fields, writer, teacher.config, stored.entries)
    config = PEagleConfig(
        **{field.name: getattr(eagle3, field.name) for field in fields_of(Eagle3Config)},
        mask_token=read_mask_token((fields, fields.nested("dflash_config")), teacher.config),
        levels=read_levels(fields),
    )
    parts = eagle3_parts(config, vocabulary, Spelling.of(stored.entries))
    parts["mask_hidden"] = (("mask_hidden", (1, 1, config.features)),)
    return fitting_checkpoint(fields.path, config, teacher, parts, stored, vocabulary)
