"""EAGLE-3 drafters as people publish them, checked against a teacher; ``layouts`` lists who writes them and how."""

from __future__ import annotations

from pathlib import Path

from draftwood.compiler.checkpoints.fields import Fields, read_json
from draftwood.compiler.checkpoints.tensors import Stored, open_stored
from draftwood.compiler.drafters.common.checkpoint import (
    CachedCheckpoint,
    Parts,
    block_parts,
    end_parts,
    fitting_checkpoint,
)
from draftwood.compiler.drafters.common.vocabulary import Vocabulary
from draftwood.compiler.drafters.eagle3.config import Eagle3Config, read_eagle3_config
from draftwood.compiler.drafters.eagle3.layouts import Spelling, read_writer
from draftwood.compiler.teachers.checkpoint import Checkpoint

# Frequencies of older exporters, and the teacher's tensors that speculators trains with.
_UNUSED = (".inv_freq", "verifier_norm.weight", "verifier_lm_head.weight")


def open_eagle3(path: Path, teacher: Checkpoint) -> CachedCheckpoint[Eagle3Config]:
    """Opens a folder with config.json and model.safetensors, shards or pytorch_model.bin, or such a file in it.

    Raises:
        CheckpointError: a file is missing, damaged or holds more than tensors; or a field, a key, a shape, a
            dtype or the vocabulary map does not fit the teacher, or leaves open what network it describes.
    """
    stored = open_used(path, "EAGLE-3")
    fields = Fields(stored.folder / "config.json", read_json(stored.folder / "config.json"))
    config, vocabulary = read_eagle3_config(fields, read_writer(fields), teacher.config, stored.entries)
    parts = eagle3_parts(config, vocabulary, Spelling.of(stored.entries))
    return fitting_checkpoint(fields.path, config, teacher, parts, stored, vocabulary)


def open_used(path: Path, drafter: str) -> Stored:
    """The tensors of a drafter, without those that nobody reads."""
    stored = open_stored(path, drafter)
    entries = {key: entry for key, entry in stored.entries.items() if not key.endswith(_UNUSED)}
    return stored._replace(entries=entries)


def eagle3_parts(config: Eagle3Config, vocabulary: Vocabulary, spelling: Spelling) -> Parts:
    """The weights of the network, and the keys and shapes of what makes them."""
    block, width, before, first = config.block, config.target_hidden, spelling.before, spelling.first
    parts: Parts = {}
    if config.own_embedding:
        parts["draft_embed.weight"] = ((spelling.embedding, (vocabulary.stored, block.hidden)),)
    parts["fc.weight"] = ((f"{before}fc.weight", (block.hidden, config.features)),)
    if config.feature_norm == "whole":
        parts["feature_norm.weight"] = ((f"{before}input_norm.weight", (config.features,)),)
    elif config.feature_norm == "each":
        for i in range(len(config.aux_layers)):
            parts[f"feature_norms.{i}.weight"] = ((f"{before}fc_norm.{i}.weight", (width,)),)
    parts["block.hidden_norm.weight"] = ((f"{first}.hidden_norm.weight", (block.hidden,)),)
    for i in range(block.layers):
        ours, theirs = f"further.{i - 1}" if i else "block", spelling.at(i)
        parts |= block_parts(block, ours, theirs, block.hidden if i else 2 * block.hidden)
    return parts | end_parts(config, vocabulary, before)
