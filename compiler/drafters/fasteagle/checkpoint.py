"""FastEagle drafters, checked against a teacher. The layout is ours, for nobody has published one.

config.json has ``architectures`` ["FastEagleDrafter"], ``model_type`` "fasteagle", ``num_hidden_layers`` N, a
Llama's field names for the blocks, ``draft_vocab_size``, ``target_hidden_size`` and ``aux_layer_ids``, the
teacher's layers whose entering states are read. The tensors are ``fc.weight`` [H, n * target_hidden_size] of n states,
``proj.weight`` [H, 2H] over cat(fused states, embedding), ``layers.{i}.*`` as a Llama's, ``norm.weight``, and
``lm_head.weight`` [draft_vocab_size, H] unless it is the teacher's, ``d2t`` and ``t2d`` as EAGLE-3 has them.

``cell_size`` R adds a cell, and ``cell_shortlist`` says how many tokens of a level it ranks: ``cell.state.weight``
[3R, R], ``cell.token.weight`` [3R, H], ``cell.level.weight`` [3R, H] and ``bias`` [3R], ``cell.out.weight`` [H, R].
"""

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
from draftwood.compiler.drafters.common.vocabulary import Vocabulary, read_vocabulary
from draftwood.compiler.drafters.fasteagle.config import FastEagleConfig, read_fasteagle_config
from draftwood.compiler.teachers.checkpoint import Checkpoint


def open_fasteagle(path: Path, teacher: Checkpoint) -> CachedCheckpoint[FastEagleConfig]:
    """Opens a folder with config.json and model.safetensors or pytorch_model.bin, or such a file in it.

    Raises:
        CheckpointError: a file is missing, damaged or holds more than tensors; or a field, a key, a shape, a
            dtype or the vocabulary map does not fit the teacher.
    """
    stored = open_stored(path, "FastEagle")
    fields = Fields(stored.folder / "config.json", read_json(stored.folder / "config.json"))
    vocabulary = read_vocabulary(fields, fields, teacher.config)
    config = read_fasteagle_config(fields, teacher.config, vocabulary, "lm_head.weight" not in stored.entries)
    return fitting_checkpoint(fields.path, config, teacher, _parts(config, vocabulary), stored, vocabulary)


def _parts(config: FastEagleConfig, vocabulary: Vocabulary) -> Parts:
    hidden = config.block.hidden
    parts: Parts = {
        "fc.weight": (("fc.weight", (hidden, config.features)),),
        "proj.weight": (("proj.weight", (hidden, 2 * hidden)),),
    }
    for i in range(config.block.layers):
        parts |= block_parts(config.block, f"cascade.{i}", f"layers.{i}", hidden)
    return parts | _cell_parts(config.cell_size, hidden) | end_parts(config, vocabulary)


def _cell_parts(size: int, hidden: int) -> Parts:
    shapes = {
        "state.weight": (3 * size, size),
        "token.weight": (3 * size, hidden),
        "level.weight": (3 * size, hidden),
        "level.bias": (3 * size,),
        "out.weight": (hidden, size),
    }
    return {f"cell.{name}": ((f"cell.{name}", shape),) for name, shape in shapes.items()} if size else {}
