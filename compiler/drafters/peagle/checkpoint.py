"""P-EAGLE drafters as people publish them: EAGLE-3 folders with the tensor ``mask_hidden`` and a mask token.

They are written as speculators writes them, which vLLM serves; SGLang reads none.

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
from draftwood.compiler.drafters.common.config import read_mask_token
from draftwood.compiler.drafters.common.export import (
    check_agreed,
    embedding,
    layout_named,
    proposals,
    refuse,
)
from draftwood.compiler.drafters.eagle3.checkpoint import eagle3_parts, open_used, read_eagle3_config
from draftwood.compiler.drafters.eagle3.export import speculators_fields, tensors_of
from draftwood.compiler.drafters.eagle3.layouts import SPECFORGE, SPECULATORS, WRITERS, Spelling, read_writer
from draftwood.compiler.drafters.eagle3.network import Eagle3Config
from draftwood.compiler.drafters.model import Folder
from draftwood.compiler.drafters.peagle.network import PEagleConfig
from draftwood.compiler.teachers.checkpoint import Checkpoint

OWN = {"PEagleDraftModel": SPECFORGE, "PEagleSpeculator": SPECULATORS}
# How many levels its trainers train, and so draft, unless they are told otherwise (speculators and Automodel).
_USUAL_LEVELS = 8
_MOST_LEVELS = 64
_MARKS = ("parallel_drafting", "ptd_token_id", "pard_token")
Opened = CachedCheckpoint[PEagleConfig]


def is_peagle(fields: Mapping[str, Any]) -> bool:
    """Whether a config.json is a P-EAGLE drafter's."""
    own = fields.get("architectures") in [[name] for name in OWN]
    marked = any(fields.get(name) not in (None, False) for name in _MARKS)
    return own or marked or fields.get("speculators_model_type") == "peagle"


def open_peagle(path: Path, teacher: Checkpoint) -> Opened:
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
        levels=_levels(fields),
    )
    parts = eagle3_parts(config, vocabulary, Spelling.of(stored.entries))
    parts["mask_hidden"] = (("mask_hidden", (1, 1, config.features)),)
    return fitting_checkpoint(fields.path, config, teacher, parts, stored, vocabulary)


def _levels(fields: Fields) -> int:
    """How many tokens a pass drafts: ``num_depths``, or what speculators proposes, or what is usual."""
    proposed = fields.get("speculators_config", {})
    methods = proposed.get("proposal_methods") if isinstance(proposed, dict) else None
    first = methods[0] if isinstance(methods, list) and methods and isinstance(methods[0], dict) else {}
    usual = Fields(fields.path, first).whole("speculative_tokens", _USUAL_LEVELS)
    levels = fields.whole("num_depths", usual)
    if not 1 <= levels <= _MOST_LEVELS:
        fields.fail("num_depths", f"1 to {_MOST_LEVELS} tokens a pass; found {levels}")
    return levels


def exported(opened: Opened, layout: str, verifier: str) -> Folder:
    """The drafter in a layout, for the teacher of this name.

    Raises:
        RequestError: the layout is not known, or has no form of what the drafter has.
    """
    write = layout_named({"speculators": _speculators}, layout, "P-EAGLE")
    check_agreed(layout, opened.config)
    return write(opened, verifier)


def _speculators(opened: Opened, verifier: str) -> Folder:
    # vLLM builds P-EAGLE without these two.
    refuse("speculators", {"norms of the teacher's states": opened.config.feature_norm != "none",
                           "norm_output": opened.config.norm_output})  # fmt: skip
    fields = {
        "architectures": ["PEagleSpeculator"],
        "speculators_model_type": "peagle",
        "mask_token_id": opened.config.mask_token,
        # Its trainer always trains the embedding: it is the drafter's, wherever it was taken from.
        "embed_requires_grad": True,
        "speculators_config": proposals("peagle", verifier, opened, opened.config.levels),
    }
    own = {"mask_hidden": opened.weight("mask_hidden"), "embed_tokens.weight": embedding(opened)}
    tensors = tensors_of(opened, "layers.0", opened.config.mapped) | own
    return Folder(fields | speculators_fields(opened), tensors)
