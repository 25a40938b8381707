"""EAGLE-3 drafters as people publish them, checked against a teacher.

The layouts of SafeAILab, SpecForge and speculators hold the same tensors; the block's keys begin with
``midlayer.``, in speculators with ``layers.0.``.
"""

from __future__ import annotations

from pathlib import Path

from draftwood.compiler.checkpoints.fields import Fields, read_json
from draftwood.compiler.checkpoints.tensors import find_file, open_tensors
from draftwood.compiler.drafters.common.checkpoint import (
    CachedCheckpoint,
    Parts,
    block_parts,
    end_parts,
    fitting_checkpoint,
)
from draftwood.compiler.drafters.common.config import AUX_STATES
from draftwood.compiler.drafters.eagle3.config import EMBED, Eagle3Config, read_eagle3_config, read_layout
from draftwood.compiler.teachers.checkpoint import Checkpoint


def open_eagle3(path: Path, teacher: Checkpoint) -> CachedCheckpoint[Eagle3Config]:
    """Opens a folder with config.json and model.safetensors or pytorch_model.bin, or such a file in it.

    Raises:
        CheckpointError: a file is missing, damaged or holds more than tensors; or a field, a key, a shape, a
            dtype or the vocabulary map does not fit the teacher, or leaves open what network it describes.
    """
    folder, file = find_file(path, "EAGLE-3")
    fields = Fields(folder / "config.json", read_json(folder / "config.json"))
    layout = read_layout(fields)
    stored, read = open_tensors(file)
    entries = {key: entry for key, entry in stored.items() if not key.endswith(".inv_freq")}
    config = read_eagle3_config(fields, layout, teacher.config, entries)
    parts = _parts(config, "layers.0" if layout == "speculators" else "midlayer")
    return fitting_checkpoint((fields.path, file), config, teacher, parts, entries, read)


def _parts(config: Eagle3Config, at: str) -> Parts:
    block, width, features = config.block, config.target_hidden, AUX_STATES * config.target_hidden
    parts: Parts = {}
    if config.own_embedding:
        parts["draft_embed.weight"] = ((EMBED, (block.vocabulary, block.hidden)),)
    parts["fc.weight"] = (("fc.weight", (block.hidden, features)),)
    if config.feature_norm == "whole":
        parts["feature_norm.weight"] = (("input_norm.weight", (features,)),)
    elif config.feature_norm == "each":
        parts |= {f"feature_norms.{i}.weight": ((f"fc_norm.{i}.weight", (width,)),) for i in range(AUX_STATES)}
    parts["block.hidden_norm.weight"] = ((f"{at}.hidden_norm.weight", (block.hidden,)),)
    return parts | block_parts(block, "block", at, 2 * block.hidden) | end_parts(config)
