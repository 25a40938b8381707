"""What the checkpoints of drafters with caches share: weights by our names, and the map between vocabularies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import torch
from torch import Tensor

from draftwood.compiler.checkpoints.safetensors_file import DTYPES, Entry, check_kinds, sha256_of
from draftwood.compiler.checkpoints.shards import Advice, check_names
from draftwood.compiler.checkpoints.tensors import Reader
from draftwood.compiler.drafters.common.config import CachedConfig
from draftwood.compiler.teachers.checkpoint import Checkpoint
from draftwood.compiler.teachers.config import TeacherConfig
from draftwood.compiler.teachers.rope import rope_tables
from draftwood.errors import CheckpointError

Config = TypeVar("Config", bound=CachedConfig)
# Our weight name -> the file's keys, each with its shape, that concatenated along dimension 0 make it.
Parts = dict[str, tuple[tuple[str, tuple[int, ...]], ...]]

_MAPS = {"d2t": "I64", "t2d": "BOOL"}
_ADVICE = Advice(
    missing="",
    extra="the drafter's alone; if one is a norm, config.json must say so by its flag",
    shape=" and the teacher; use the drafter of this teacher",
)


@dataclass(frozen=True, slots=True)
class CachedCheckpoint(Generic[Config]):
    """A drafter on disk that fits its teacher."""

    # config.json and the file of tensors.
    files: tuple[Path, Path]
    config: Config
    dtype: torch.dtype
    # The teacher's id of every draft id, int64 [draft_vocabulary].
    ids: Tensor
    teacher: Checkpoint
    parts: Parts
    read: Reader

    def names(self) -> list[str]:
        """Our weight names: the parameters of the network."""
        return list(self.parts)

    def keys(self, name: str) -> tuple[str, ...]:
        """The file's keys of what makes a weight."""
        return tuple(key for key, _ in self.parts[name])

    def stored(self, key: str) -> Tensor:
        """A tensor under its key in the file."""
        return self.read(key)

    def weight(self, name: str) -> Tensor:
        """A weight under our name, as stored; a missing output matrix is the teacher's, cut to the draft's ids."""
        if name == "draft_head.weight" and self.config.tied_head:
            head = "embed.weight" if self.teacher.config.tied else "lm_head.weight"
            return self.teacher.weight(head).index_select(0, self.ids)
        parts = [self.read(key) for key in self.keys(name)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def buffers(self, positions: int) -> dict[str, Tensor]:
        """The network's buffers under our names: rotary tables [positions, D], and the map where it has one."""
        tables = zip(("draft_cos", "draft_sin"), rope_tables(self.config.block, positions), strict=True)
        mapped = {"teacher_ids": self.ids} if self.config.mapped else {}
        return mapped | {name: torch.from_numpy(table) for name, table in tables}

    def maps(self) -> dict[str, Tensor]:
        """The offsets from draft ids to the teacher's, ``d2t`` int64 [draft_vocabulary]; nothing without a subset."""
        return {"d2t": self.ids - torch.arange(len(self.ids))} if self.config.mapped else {}

    def digest(self) -> str:
        """SHA-256, in hex, over config.json and the file of tensors."""
        return sha256_of(self.files)


def block_parts(block: TeacherConfig, ours: str, theirs: str, width: int) -> Parts:
    """The weights of a decoder block whose q, k and v read ``width`` features."""
    # H hidden, I intermediate, Q width of all query heads, K width of all key/value heads
    H, I = block.hidden, block.intermediate  # noqa: E741
    Q, K = block.heads * block.head_dim, block.kv_heads * block.head_dim
    rows = {"q": Q, "k": K, "v": K}
    parts: Parts = {
        f"{ours}.attn_norm.weight": ((f"{theirs}.input_layernorm.weight", (H,)),),
        f"{ours}.qkv.weight": tuple((f"{theirs}.self_attn.{p}_proj.weight", (n, width)) for p, n in rows.items()),
        f"{ours}.o.weight": ((f"{theirs}.self_attn.o_proj.weight", (H, Q)),),
        f"{ours}.mlp_norm.weight": ((f"{theirs}.post_attention_layernorm.weight", (H,)),),
        f"{ours}.gate_up.weight": tuple((f"{theirs}.mlp.{p}_proj.weight", (I, H)) for p in ("gate", "up")),
        f"{ours}.down.weight": ((f"{theirs}.mlp.down_proj.weight", (H, I)),),
    }
    if block.qkv_bias:
        parts[f"{ours}.qkv.bias"] = tuple((f"{theirs}.self_attn.{p}_proj.bias", (n,)) for p, n in rows.items())
    if block.o_bias:
        parts[f"{ours}.o.bias"] = ((f"{theirs}.self_attn.o_proj.bias", (H,)),)
    return parts


def end_parts(config: CachedConfig) -> Parts:
    """The weights behind the blocks; an output matrix cut from the teacher's has no keys."""
    hidden = config.block.hidden
    parts: Parts = {"draft_norm.weight": (("norm.weight", (hidden,)),)}
    if config.has_head:
        own = (("lm_head.weight", (config.draft_vocabulary, hidden)),)
        parts["draft_head.weight"] = () if config.tied_head else own
    return parts


def fitting_checkpoint(
    files: tuple[Path, Path],
    config: Config,
    teacher: Checkpoint,
    parts: Parts,
    entries: Mapping[str, Entry],
    read: Reader,
) -> CachedCheckpoint[Config]:
    """The checkpoint, if its file holds what is expected of it; CheckpointError otherwise."""
    dtype = _dtype_of(files[1], entries, parts)
    ids = _teacher_ids(files[1], entries, read, config.draft_vocabulary, config.block.vocabulary)
    return CachedCheckpoint(files, config, dtype, ids, teacher, parts, read)


def _dtype_of(file: Path, entries: Mapping[str, Entry], parts: Parts) -> torch.dtype:
    """The one dtype of the weights, if the file holds exactly what is expected beside d2t and t2d."""
    expected = {key: shape for keys in parts.values() for key, shape in keys}
    check_names(file, expected, {key: entry for key, entry in entries.items() if key not in _MAPS}, _ADVICE)
    return DTYPES[check_kinds({key: entries[key] for key in expected})]


def _teacher_ids(
    file: Path, entries: Mapping[str, Entry], read: Reader, draft_vocabulary: int, vocabulary: int
) -> Tensor:
    """int64 [draft_vocabulary], the teacher's id of every draft id: j + d2t[j], ``d2t`` being an offset.

    Raises:
        CheckpointError: d2t is missing where it is needed, or it is no map into the teacher's vocabulary, or
            t2d (bool [vocabulary], the teacher's ids that it covers) says something else.
    """
    sizes = {"d2t": draft_vocabulary, "t2d": vocabulary}
    for name in sizes.keys() & entries.keys():
        entry = entries[name]
        if entry.kind != _MAPS[name] or entry.shape != (sizes[name],):
            raise CheckpointError(
                f"{file}: {name} is {entry.kind} {list(entry.shape)}; expected {_MAPS[name]} [{sizes[name]}]"
            )
    order = torch.arange(draft_vocabulary)
    if "d2t" not in entries and draft_vocabulary < vocabulary:
        raise CheckpointError(
            f"{file}: d2t is missing; expected I64 [{draft_vocabulary}], for the draft vocabulary is smaller than"
            f" the teacher's {vocabulary}"
        )
    ids = order + read("d2t") if "d2t" in entries else order
    lowest, highest = int(ids.min()), int(ids.max())
    if lowest < 0 or highest >= vocabulary:
        raise CheckpointError(
            f"{file}: j + d2t[j] runs from {lowest} to {highest}; expected ids from 0 to {vocabulary - 1}; d2t must"
            " be an offset from the draft id, not the teacher's id"
        )
    if bool((ids.diff() <= 0).any()):
        at = int((ids.diff() <= 0).nonzero()[0])
        raise CheckpointError(
            f"{file}: j + d2t[j] is {int(ids[at])} at {at} and {int(ids[at + 1])} next; expected ascending ids, as"
            " every published map has; d2t must be an offset from the draft id"
        )
    if "t2d" in entries and not torch.equal(read("t2d").nonzero().flatten(), ids):
        raise CheckpointError(f"{file}: t2d marks other ids than j + d2t[j]; expected both to name the same tokens")
    return ids
