"""Makes a teacher and its drafter larger without changing their function, to take timings at a size nobody trained.

The text stays that of the small teacher, while every matrix has the large shape. New rows that nothing reads
hold small random values, so no kernel can take a short cut. Exact in real arithmetic; in floating point the
gains and eps are rounded once and sums run in another order, so logits agree to rounding. Where the hidden
size grows by a power of four, gains and eps are scaled without rounding.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from draftwood.compiler.bundle.staging import staged
from draftwood.compiler.checkpoints.fields import read_json
from draftwood.compiler.drafters.model import DrafterCheckpoint
from draftwood.compiler.drafters.registry import kind_of
from draftwood.compiler.drafters.widening import LLAMA_AXES, Axes, Widening, size_fields
from draftwood.compiler.teachers.checkpoint import Checkpoint, expected_tensors
from draftwood.compiler.teachers.config import DType, TeacherConfig
from draftwood.compiler.teachers.folder import tokenizer_files
from draftwood.errors import RequestError

# H hidden size, H' the widened one; q heads of one key/value head form a group of g, widened g'.

# What these write is read through zero columns of o_proj and down_proj, or reads zero hidden columns.
_FREE = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
# They norm what a head has, and a head keeps its size.
_HEAD_NORMS = ("q_norm.weight", "k_norm.weight")
_SPREAD = 0.02
_SIZES = ("hidden", "intermediate", "layers", "heads", "kv_heads")


def widen(
    source: Path,
    target: Path,
    *,
    dtype: DType | None = None,
    seed: int = 0,
    **sizes: int,
) -> TeacherConfig:
    """Writes the teacher of ``source`` to a new folder ``target`` in a larger shape; ``sizes`` are of `_SIZES`, and one
    that is not given is kept.

    The residual stream is padded with zeros. Its mean square over H' is H / H' times the one over H, so with
    eps' = eps H / H' the norm's quotient grows by sqrt(H' / H), and gains scaled by sqrt(H / H') undo it.
    Query head m of key/value head j moves to slot j g' + m, so it reads the same keys. head_dim stays.
    Where heads are normed, eps' is theirs too: queries and keys scaled by sqrt(H / H') keep the quotient, gains stay.

    Returns:
        The configuration that was written.

    Raises:
        CheckpointError: the source is not a supported teacher.
        RequestError: the target exists, or a size is smaller than the source's or does not fit the others.
    """
    teacher = Checkpoint.open(source)
    whole: dict[str, Any] = {name: getattr(teacher.config, name) for name in _SIZES} | sizes
    _check_sizes(teacher.config, whole)
    eps = teacher.config.rms_norm_eps * teacher.config.hidden / whole["hidden"]
    wide = replace(teacher.config, **whole, rms_norm_eps=eps, dtype=dtype or teacher.config.dtype)
    with staged(target) as folder:
        _write_config(source, folder, wide)
        tensors = _teacher_tensors(teacher, wide, seed)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        extra = [path for path in (source / "generation_config.json",) if path.is_file()]
        for path in tokenizer_files(source) + extra:
            shutil.copyfile(path, folder / path.name)
    return wide


def widen_drafter(
    source: Path, target: Path, teacher: Path, wide: TeacherConfig, *, dtype: DType | None = None, seed: int = 0
) -> None:
    """Writes a drafter of the folder ``teacher`` for its widened form ``wide``: a folder with the same kind's files.

    Its kind says along which axes its tensors lie. A block takes the widened teacher's hidden size, grows in MLP width
    and heads as the teacher's do, so that narrow blocks stay narrow, and is padded as those are; every hidden state
    that a matrix reads beside others is padded in its own place. The teacher's new layers come last, so the states
    that a drafter reads enter the layers they entered before.

    Raises:
        CheckpointError: the source is no drafter of this teacher.
        RequestError: the target exists, the drafter's hidden size is not the teacher's, or a size of ``wide`` is
            smaller than the drafter's or does not fit the others.
    """
    small, kind = Checkpoint.open(teacher), kind_of(source)
    opened = kind.model.open(source, small)
    widening = opened.model.widening()
    if widening is None:
        raise RequestError(f"{source}: nobody has said how {kind.title} grows; expected a drafter of another kind")
    kept: Any = dtype or str(opened.checkpoint.dtype).removeprefix("torch.")
    if widening.block is None:
        _check_sizes(small.config, {name: getattr(wide, name) for name in _SIZES})
        before, after = small.config, replace(wide, dtype=kept)
    else:
        before, after = widening.block, _widened_block(source, widening.block, small.config, wide, kept)
    config = (source if source.is_dir() else source.parent) / "config.json"
    fields = widening.fields(read_json(config) if config.is_file() else {}, after)
    with staged(target) as folder:
        (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n")
        tensors = _drafter_tensors(opened.checkpoint, widening, before, after, seed)
        save_file(tensors, folder / kind.model.weights_file, metadata={"format": "pt"})


def _widened_block(
    source: Path, block: TeacherConfig, teacher: TeacherConfig, wide: TeacherConfig, dtype: DType
) -> TeacherConfig:
    """A drafter's block for the widened teacher."""
    if block.hidden != teacher.hidden:
        raise RequestError(
            f"{source}: hidden size is {block.hidden}; expected {teacher.hidden}, as the teacher's: a drafter of"
            " another width is not widened"
        )
    sizes: dict[str, Any] = _in_proportion(block, teacher, wide)
    _check_sizes(block, sizes)
    return replace(block, **sizes, rms_norm_eps=block.rms_norm_eps * block.hidden / wide.hidden, dtype=dtype)


def _in_proportion(small: TeacherConfig, teacher: TeacherConfig, wide: TeacherConfig) -> dict[str, int]:
    """Sizes of a drafter's block that stand to those of the widened teacher as they stood to the teacher's."""

    def grown(size: int, whole: int, widened: int) -> int:
        return -(-size * widened // whole)

    kv_heads = grown(small.kv_heads, teacher.kv_heads, wide.kv_heads)
    group = grown(small.heads // small.kv_heads, teacher.heads // teacher.kv_heads, wide.heads // wide.kv_heads)
    return {
        "hidden": wide.hidden,
        "intermediate": grown(small.intermediate, teacher.intermediate, wide.intermediate),
        "heads": kv_heads * group,
        "kv_heads": kv_heads,
    }


def _drafter_tensors(
    drafter: DrafterCheckpoint, widening: Widening, small: TeacherConfig, wide: TeacherConfig, seed: int
) -> dict[str, Tensor]:
    """Every tensor of a widened drafter by its key in the source, and the map between the vocabularies."""
    places, lengths = _places(small, wide), _lengths(wide)
    for axis, parts in widening.parts.items():
        found, length = [], 0
        for part in parts:
            found.append(length + (torch.arange(part) if isinstance(part, int) else places[part]))
            length += part if isinstance(part, int) else lengths[part]
        places[axis], lengths[axis] = torch.cat(found), length
    gain = (small.hidden / wide.hidden) ** 0.5
    random = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, wide.dtype)
    tensors = {}
    for key in (key for name in drafter.names() for key in drafter.keys(name)):
        along = _along(key, widening.axes)
        shape = tuple(lengths[axis] for axis in along)
        scale, at = gain if _is_scaled(key, small) else 1.0, [places[axis] for axis in along]
        tensors[key] = _padded(key, drafter.stored(key), shape, at, scale, dtype, random)
    return tensors | drafter.maps()


def _check_sizes(small: TeacherConfig, sizes: Mapping[str, int]) -> None:
    for name, size in sizes.items():
        if size < getattr(small, name):
            raise RequestError(f"{name} is {size}; expected at least the source's {getattr(small, name)}")
    heads, kv_heads = sizes["heads"], sizes["kv_heads"]
    group = small.heads // small.kv_heads
    if heads % kv_heads or heads // kv_heads < group:
        raise RequestError(
            f"heads is {heads} for {kv_heads} kv_heads; expected a multiple, at least {group} for each,"
            " so that every query head keeps its key/value head"
        )
    if sizes["hidden"] % heads:
        raise RequestError(
            f"hidden is {sizes['hidden']}; expected a multiple of heads, {heads}: transformers refuses others"
        )


def _teacher_tensors(teacher: Checkpoint, wide: TeacherConfig, seed: int) -> dict[str, Tensor]:
    """Every tensor of the widened teacher, by its Hugging Face name."""
    places = _places(teacher.config, wide)
    gain = (teacher.config.hidden / wide.hidden) ** 0.5
    random = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, wide.dtype)
    tensors = {}
    for name, shape in expected_tensors(wide).items():
        stored = teacher.tensor(name) if name in teacher.entries else None
        along = [places[axis] for axis in _along(name, LLAMA_AXES)]
        scale = gain if _is_scaled(name, wide) else 1.0
        tensors[name] = _padded(name, stored, shape, along, scale, dtype, random)
    return tensors


def _is_scaled(name: str, block: TeacherConfig) -> bool:
    """Whether a tensor is multiplied by sqrt(H / H'): norms over H, and what a head's norm reads."""
    if "norm" in name:
        return not name.endswith(_HEAD_NORMS)
    return block.qk_norm and any(part in name for part in ("q_proj", "k_proj"))


def _along(name: str, axes: Axes) -> tuple[str, ...]:
    """The axes of a tensor, by the longest end of its name that has an entry."""
    return axes[max((end for end in axes if name.endswith(end)), key=len)]


def _padded(
    name: str,
    stored: Tensor | None,
    shape: tuple[int, ...],
    places: Sequence[Tensor],
    scale: float,
    dtype: torch.dtype,
    random: torch.Generator,
) -> Tensor:
    """A tensor of the widened shape with ``stored``, None in a new layer, at ``places``, times ``scale``."""
    if any(part in name for part in _FREE):
        filled = torch.randn(shape, generator=random) * _SPREAD
    else:  # norms of new layers read hidden states of any size, as the others do
        filled = torch.full(shape, scale if "norm" in name and stored is None else 0.0)
    wide = filled.to(dtype)
    if stored is not None:
        rows, *columns = places
        value = (stored.double() * scale if scale != 1.0 else stored).to(dtype)
        wide[(rows[:, None], *columns) if columns else rows] = value
    return wide


def _places(small: TeacherConfig, wide: TeacherConfig) -> dict[str, Tensor]:
    """Where each index of the source goes, int64, by axis."""
    group, wide_group = small.heads // small.kv_heads, wide.heads // wide.kv_heads
    head = torch.arange(small.heads)
    slot = head // group * wide_group + head % group
    query = slot[:, None] * small.head_dim + torch.arange(small.head_dim)
    return {
        "vocabulary": torch.arange(small.vocabulary),
        "hidden": torch.arange(small.hidden),
        "query": query.flatten(),
        "key": torch.arange(small.kv_heads * small.head_dim),
        "inner": torch.arange(small.intermediate),
        "head": torch.arange(small.head_dim),
    }


def _lengths(wide: TeacherConfig) -> dict[str, int]:
    """The widened lengths of the axes."""
    return {
        "vocabulary": wide.vocabulary,
        "hidden": wide.hidden,
        "query": wide.heads * wide.head_dim,
        "key": wide.kv_heads * wide.head_dim,
        "inner": wide.intermediate,
        "head": wide.head_dim,
    }


def _write_config(source: Path, folder: Path, wide: TeacherConfig) -> None:
    config: dict[str, Any] = json.loads((source / "config.json").read_text())
    config |= size_fields(wide, config) | {"num_hidden_layers": wide.layers}
    if config.get("layer_types"):
        config["layer_types"] = ["full_attention"] * wide.layers
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
