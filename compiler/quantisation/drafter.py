"""A drafter's linear layers in W8A8. Its candidates are guesses, so nothing is calibrated and no text changes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from draftwood.compiler.bundle.staging import staged
from draftwood.compiler.checkpoints.fields import read_json
from draftwood.compiler.checkpoints.quantised import CONFIG
from draftwood.compiler.checkpoints.weight import WeightEntry
from draftwood.compiler.drafters.model import OpenedDrafter
from draftwood.compiler.drafters.quantised import linear_layers
from draftwood.compiler.drafters.registry import kind_of, kinds, open_drafter
from draftwood.compiler.onnx.weights import write_weights
from draftwood.compiler.quantisation.writing import WEIGHT_FILES, described, int8_entries
from draftwood.compiler.teachers.checkpoint import Checkpoint
from draftwood.errors import RequestError


def quantise_drafter(path: Path, teacher: Checkpoint, out: Path, progress: Callable[[str], None]) -> OpenedDrafter:
    """Writes the folder ``out``, whole or not at all, in the layout of ``path``, and opens it.

    Raises:
        CheckpointError: the drafter is damaged or of another teacher.
        RequestError: it is quantised already, no such kind can be, or ``out`` exists.
    """
    kind, opened = kind_of(path), open_drafter(path, teacher)
    if not kind.quantises:
        able = ", ".join(known.name for known in kinds() if known.quantises)
        raise RequestError(
            f"{path}: {kind.title} cannot be quantised yet; expected one of {able}; build with it as it is"
        )
    if opened.model.quantised:
        raise RequestError(f"{path}: is quantised already; name the original")
    layers = linear_layers(opened, teacher.config)
    chosen = {key for name in layers for key in opened.checkpoint.keys(f"{name}.weight")}
    source = path if path.is_dir() else path.parent
    with staged(out) as folder:
        for file in source.iterdir():
            if file.is_file() and not file.name.endswith(WEIGHT_FILES):
                shutil.copyfile(file, folder / file.name)
        entries = list(_entries(opened, chosen, progress))
        write_weights(folder / kind.weights_file, entries, opened.checkpoint.dtype)
        config = folder / "config.json"
        plain = (e.name for e in entries if len(e.shape) == 2 and e.name not in chosen)
        alone = [name.removesuffix(".weight") for name in plain if name.endswith(".weight")]
        fields = (read_json(config) if config.is_file() else {}) | {CONFIG: described(alone)}
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
