"""A drafter's linear layers in W8A8. Its candidates are guesses, so nothing is calibrated and no text changes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from draftwood.compiler.bundle.staging import staged
from draftwood.compiler.checkpoints.fields import read_json
from draftwood.compiler.checkpoints.scheme import CONFIG
from draftwood.compiler.checkpoints.weight import WeightEntry
from draftwood.compiler.drafters.int8 import borrows_head, linear_layers
from draftwood.compiler.drafters.model import OpenedDrafter
from draftwood.compiler.drafters.registry import kind_of, open_drafter
from draftwood.compiler.onnx.weights import write_weights
from draftwood.compiler.quantisation.writing import HEAD, WEIGHT_FILES, described, int8_entries
from draftwood.compiler.teachers.checkpoint import Checkpoint
from draftwood.errors import RequestError


def quantise_drafter(path: Path, teacher: Checkpoint, out: Path, progress: Callable[[str], None]) -> OpenedDrafter:
    """Writes the folder ``out``, whole or not at all, in the layout of ``path``, and opens it.

    Raises:
        CheckpointError: the drafter is damaged or of another teacher.
        RequestError: it is quantised already, or ``out`` exists.
    """
    kind, opened = kind_of(path), open_drafter(path, teacher)
    if opened.model.quantised:
        raise RequestError(f"{path}: is quantised already; name the original")
    layers = linear_layers(opened, teacher.config)
    chosen = {key for name in layers for key in opened.checkpoint.keys(f"{name}.weight")}
    source = path if path.is_dir() else path.parent
    with staged(out) as folder:
        for file in source.iterdir():
            if file.is_file() and not file.name.endswith(WEIGHT_FILES):
                shutil.copyfile(file, folder / file.name)
        entries = [*_entries(opened, chosen, progress), *(head := list(_own_head(opened, teacher, progress)))]
        write_weights(folder / kind.model.weights_file, entries, opened.checkpoint.dtype)
        config = folder / "config.json"
        plain = (e.name for e in entries if len(e.shape) == 2 and e.dtype is not torch.int8)
        alone = [name.removesuffix(".weight") for name in plain if name.endswith(".weight")]
        fields = (read_json(config) if config.is_file() else {}) | {CONFIG: described(alone)}
        if head:
            fields |= {"draft_vocab_size": head[0].shape[0]}
        config.write_text(json.dumps(fields, indent=2) + "\n")
    return open_drafter(out, teacher)


def _entries(opened: OpenedDrafter, chosen: set[str], progress: Callable[[str], None]) -> Iterator[WeightEntry]:
    """Every tensor of the drafter's own under its key, with scales behind the chosen ones."""
    checkpoint = opened.checkpoint
    for key in dict.fromkeys(key for name in checkpoint.names() for key in checkpoint.keys(name)):
        value, read = checkpoint.stored(key), partial(checkpoint.stored, key)
        if key in chosen:
            progress(key)
            yield from int8_entries(key, tuple(value.shape), read)
        else:
            yield WeightEntry(key, tuple(value.shape), read, dtype=value.dtype)
    for key, value in checkpoint.maps().items():
        yield WeightEntry(key, tuple(value.shape), value.clone, dtype=value.dtype)


def _own_head(opened: OpenedDrafter, teacher: Checkpoint, progress: Callable[[str], None]) -> Iterator[WeightEntry]:
    """The teacher's output matrix, cut to the ids that the drafter may propose, where it ranks with that."""
    if borrows_head(opened, teacher.config):
        progress(HEAD)
        config = opened.model.config
        shape = (config.draft_vocabulary, config.block.hidden)
        yield from int8_entries(HEAD, shape, partial(opened.checkpoint.weight, "draft_head.weight"))
