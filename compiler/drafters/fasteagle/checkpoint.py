"""FastEagle drafters, checked against a teacher. The layout is ours, for nobody has published one.

config.json has ``architectures`` ["FastEagleDrafter"], ``model_type`` "fasteagle", ``num_hidden_layers`` N, a
Llama's field names for the blocks, ``draft_vocab_size``, ``target_hidden_size`` and ``aux_layer_ids``, the
teacher's layers whose entering states are read. The tensors are ``fc.weight`` [H, n * target_hidden_size] of n states,
``proj.weight`` [H, 2H] over cat(fused states, embedding), ``layers.{i}.*`` as a Llama's, ``norm.weight``, and
``lm_head.weight`` [draft_vocab_size, H] unless it is the teacher's, ``d2t`` and ``t2d`` as EAGLE-3 has them.
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
from draftwood.compiler.drafters.common.config import (
    CachedConfig,
    check_aux_layers,
    read_block,
    read_target,
    read_window,
)
from draftwood.compiler.drafters.common.vocabulary import Vocabulary, read_vocabulary
from draftwood.compiler.teachers.checkpoint import Checkpoint
from draftwood.compiler.teachers.config import TeacherConfig


def open_fasteagle(path: Path, teacher: Checkpoint) -> CachedCheckpoint[CachedConfig]:
    """Opens a folder with config.json and model.safetensors or pytorch_model.bin, or such a file in it.

    Raises:
        CheckpointError: a file is missing, damaged or holds more than tensors; or a field, a key, a shape, a
            dtype or the vocabulary map does not fit the teacher.
    """
    stored = open_stored(path, "FastEagle")
    fields = Fields(stored.folder / "config.json", read_json(stored.folder / "config.json"))
    vocabulary = read_vocabulary(fields, fields, teacher.config)
    config = _read_config(fields, teacher.config, vocabulary, "lm_head.weight" not in stored.entries)
    return fitting_checkpoint(fields.path, config, teacher, _parts(config, vocabulary), stored, vocabulary)


def _parts(config: CachedConfig, vocabulary: Vocabulary) -> Parts:
    hidden = config.block.hidden
    parts: Parts = {
        "fc.weight": (("fc.weight", (hidden, config.features)),),
        "proj.weight": (("proj.weight", (hidden, 2 * hidden)),),
    }
    for i in range(config.block.layers):
        parts |= block_parts(config.block, f"cascade.{i}", f"layers.{i}", hidden)
    return parts | end_parts(config, vocabulary)


def _read_config(fields: Fields, teacher: TeacherConfig, vocabulary: Vocabulary, tied_head: bool) -> CachedConfig:
    """The network that config.json describes.

    Raises:
        CheckpointError: a field is missing or does not fit the teacher.
    """
    for name, expected in (("architectures", ["FastEagleDrafter"]), ("model_type", "fasteagle")):
        if fields.get(name) != expected:
            fields.fail(name, f"{expected!r}, a FastEagle drafter")
    block = read_block(fields, teacher, max(fields.whole("num_hidden_layers"), 1), ("fasteagle",))
    if read_window(fields, block.layers) is not None:
        fields.fail("layer_types", "'full_attention' in every layer, or no such field")
    if block.hidden != teacher.hidden:
        fields.fail("hidden_size", f"{teacher.hidden} as the teacher has, whose embedding the drafter reads")
    return CachedConfig(
        block=block,
        target_hidden=read_target(fields, teacher, block.hidden),
        aux_layers=check_aux_layers(fields, "aux_layer_ids", fields.tokens("aux_layer_ids", None), teacher),
        draft_vocabulary=vocabulary.draft,
        own_embedding=False,
        tied_head=tied_head,
    )
