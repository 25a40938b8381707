"""Needs of a job that this machine may not have, looked at in its first second: memory, disk, a tokenizer."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from draftwood.compiler.teachers.checkpoint import Checkpoint
from draftwood.compiler.teachers.conversion import Precision, in_precision
from draftwood.compiler.teachers.formats import has_tokenizer
from draftwood.compiler.teachers.precisions import precisions
from draftwood.errors import RequestError
from draftwood.kernels.nbits import BLOCK
from draftwood.tools.machine import memory
from draftwood.tools.prompts import Prompt
from draftwood.tools.tokenizers import tokenizer_of

# Of the memory so much is a bundle's: the rest is for caches, the product and the system.
_SHARE = 0.9
# A CPU's bundle holds its matrices twice: as they are, and as the kernels read them.
COPIES = 2
# Texts and graphs besides the weights.
_BESIDE_BYTES = 64 << 20


def weight_bytes(checkpoint: Checkpoint, precision: Precision) -> int:
    """Bytes of the weights of a CPU's bundle in memory; on disk up to `COPIES` times as many."""
    teacher = in_precision(checkpoint, precision)
    packed = {packing.name: packing for packing in teacher.config.packed}
    total = 0.0
    for name, part in teacher.parts.items():
        layer, _, kind = name.rpartition(".")
        # Tensors next to a matrix are counted with it.
        source = part if part.tensors else checkpoint.parts.get(name, checkpoint.parts["embed.weight"])
        if kind.startswith("weight_"):
            continue
        numbers = sum(math.prod(shape) for _, shape in source.tensors)
        if packing := packed.get(layer):
            beside = 4 + 4 * packing.minimum + packing.bits / 8 * packing.zeros
            total += numbers * (packing.bits / 8 + beside / BLOCK)
        elif layer in teacher.config.quantised:
            total += numbers + 4 * sum(shape[0] for _, shape in source.tensors)
        else:
            total += 4 * numbers
    return int(total)


def check_room(checkpoint: Checkpoint, precision: Precision, out: Path, copies: int = COPIES, runs: bool = True) -> str:
    """The room that the weights take here, for people.

    Raises:
        RequestError: ``copies`` of them do not fit on the disk of ``out``, or one that ``runs`` not in memory; says
            which precision would.
    """
    needed, there = weight_bytes(checkpoint, precision), memory()["total_bytes"]
    free = shutil.disk_usage(_there(out)).free
    need = f"--precision {precision}: {_gb(needed)} of weights; {_gb(free)} of disk are free"
    need += f", {_gb(there)} of memory are here" if there else ""
    if runs and there and needed > _SHARE * there:
        raise RequestError(f"{need}; cannot run here; {_way_out(checkpoint, needed, _SHARE * there)}")
    if copies * needed + _BESIDE_BYTES > free:
        more = f", in {copies} copies" if copies > 1 else ""
        raise RequestError(f"{need}{more}; cannot be written to {out}; {_way_out(checkpoint, needed, free / copies)}")
    return need


def check_prompts(model: Path, checkpoint: Checkpoint, prompts: Sequence[Prompt]) -> None:
    """RequestError if the model has no tokenizer for them, or one with tokens that the teacher does not have."""
    if not has_tokenizer(model):
        raise RequestError(
            f"{model}: has no tokenizer, and prompts are texts; put its tokenizer.json there, or use draftwood build"
            " and give prompts as token ids"
        )
    tokenizer, vocabulary = tokenizer_of(model), checkpoint.config.vocabulary
    for prompt in prompts:
        check_ids(model, tokenizer.encode(prompt.text), vocabulary)


def check_ids(model: Path, ids: Sequence[int], vocabulary: int) -> None:
    """RequestError if a text has tokens beyond the teacher's vocabulary."""
    if ids and max(ids) >= vocabulary:
        raise RequestError(
            f"{model}: its tokenizer makes token {max(ids)} of a text; expected one of the teacher's {vocabulary};"
            " take the tokenizer that the teacher was published with"
        )


def fitting(checkpoint: Checkpoint) -> dict[Precision, int]:
    """The precisions whose weights fit into this machine's memory, and their bytes."""
    there = memory()["total_bytes"] or math.inf
    sizes = {name: weight_bytes(checkpoint, name) for name in precisions(checkpoint)}
    return {name: size for name, size in sizes.items() if size <= _SHARE * there}


def fit_together(sizes: Mapping[Precision, int]) -> bool:
    """Whether bundles of these precisions can be in this machine's memory at one time."""
    return sum(sizes.values()) <= _SHARE * (memory()["total_bytes"] or math.inf)


def _way_out(checkpoint: Checkpoint, needed: int, limit: float) -> str:
    """The precision that rounds least of those that fit."""
    smaller = [name for name in reversed(precisions(checkpoint)) if weight_bytes(checkpoint, name) <= limit]
    if smaller and weight_bytes(checkpoint, smaller[0]) < needed:
        return f"choose --precision {smaller[0]}, {_gb(weight_bytes(checkpoint, smaller[0]))}"
    return "take a smaller teacher, or a larger machine"


def _there(path: Path) -> Path:
    """The nearest folder that exists."""
    folder = path.absolute()
    while not folder.is_dir():
        folder = folder.parent
    return folder


def _gb(size: float) -> str:
    return f"{size / 1e9:.3g} GB"
