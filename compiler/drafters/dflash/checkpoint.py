"""DFlash drafters as people publish them, checked against a teacher; ``config`` lists who writes them and how."""

from __future__ import annotations

from pathlib import Path

from draftwood.compiler.checkpoints.fields import Fields, read_json
from draftwood.compiler.checkpoints.tensors import open_stored
from draftwood.compiler.drafters.common.checkpoint import (
    CachedCheckpoint,
    Parts,
    block_parts,
    end_parts,
    fitting_checkpoint,
)
from draftwood.compiler.drafters.common.vocabulary import Vocabulary
from draftwood.compiler.drafters.dflash.config import DFlashConfig, read_dflash_config
from draftwood.compiler.teachers.checkpoint import Checkpoint


def open_dflash(path: Path, teacher: Checkpoint) -> CachedCheckpoint[DFlashConfig]:
    """Opens a folder with config.json and model.safetensors, shards or pytorch_model.bin, or such a file in it.

    Raises:
        CheckpointError: a file is missing, damaged or holds more than tensors; or a field, a key, a shape, a
            dtype or the vocabulary map does not fit the teacher, or leaves open what network it describes.
    """
    stored = open_stored(path, "DFlash")
    fields = Fields(stored.folder / "config.json", read_json(stored.folder / "config.json"))
    config, vocabulary = read_dflash_config(fields, teacher.config, stored.entries)
    return fitting_checkpoint(fields.path, config, teacher, dflash_parts(config, vocabulary), stored, vocabulary)


def dflash_parts(config: DFlashConfig, vocabulary: Vocabulary) -> Parts:
    """The weights of the block and both ends of the network."""
    block, hidden = config.block, config.block.hidden
    parts: Parts = {}
    if config.own_embedding:
        parts["draft_embed.weight"] = (("embed_tokens.weight", (vocabulary.stored, hidden)),)
    parts["fc.weight"] = (("fc.weight", (hidden, config.features)),)
    parts["feature_norm.weight"] = (("hidden_norm.weight", (hidden,)),)
    for i in range(block.layers):
        parts |= block_parts(block, f"stack.{i}", f"layers.{i}", hidden)
    return parts | end_parts(config, vocabulary)
