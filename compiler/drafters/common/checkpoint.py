"""Checkpoints of drafters with caches: weights by our names, and the expected tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import torch
from torch import Tensor

from draftwood.compiler.checkpoints.safetensors_file import DTYPES, Entry, check_kinds, sha256_of
from draftwood.compiler.checkpoints.shards import Advice, check_names
from draftwood.compiler.checkpoints.tensors import DrafterTensors, Reader
from draftwood.compiler.drafters.common.config import CachedConfig
from draftwood.compiler.drafters.common.vocabulary import MAPS, Vocabulary, teacher_ids
from draftwood.compiler.teachers.checkpoint import Checkpoint
from draftwood.compiler.teachers.config import TeacherConfig
from draftwood.compiler.teachers.rope import rope_tables

Config = TypeVar("Config", bound=CachedConfig)
# Our weight name -> the file's keys, each with its shape, that concatenated along dimension 0 make it.
Parts = dict[str, tuple[tuple[str, tuple[int, ...]], ...]]

_ADVICE = Advice(
    missing="",
    extra="the drafter's alone; if one is a norm, config.json must say so by its flag",
    shape=" and the teacher; use the drafter of this teacher",
)


@dataclass(frozen=True, slots=True)
class CachedCheckpoint(Generic[Config]):
    """A drafter on disk that fits its teacher."""

    # config.json and the files of tensors.
    files: tuple[Path, ...]
    config: Config
    # The type of the weights; float32 if they are of several.
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
        """The file's keys of the tensors that make a weight."""
        return tuple(key for key, _ in self.parts[name])

    def stored(self, key: str) -> Tensor:
        """A tensor under its key in the file."""
        return self.read(key)

    def weight(self, name: str) -> Tensor:
        """A weight under our name; a missing output matrix is the teacher's, cut to the draft's ids."""
        if name == "draft_head.weight" and self.config.tied_head:
            head = "embed.weight" if self.teacher.config.tied else "lm_head.weight"
            return self.teacher.matrix(head).index_select(0, self.ids)
        parts = [self.read(key).to(self.dtype) for key in self.keys(name)]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        return whole[: self._rows(name)]

    def _rows(self, name: str) -> int | None:
        """The number of rows of a table that are used; the rest is padding."""
        known, drafted = self.config.block.vocabulary, self.config.draft_vocabulary
        used = {"draft_embed.weight": known, "markov_head.markov_w1.weight": known}
        used |= {"draft_head.weight": drafted, "markov_head.markov_w2.weight": drafted}
        return used.get(name)

    def buffers(self, positions: int) -> dict[str, Tensor]:
        """The network's buffers under our names: rotary tables [positions, D], and the map if it has one."""
        tables = zip(("draft_cos", "draft_sin"), rope_tables(self.config.block, positions), strict=True)
        mapped = {"teacher_ids": self.ids} if self.config.mapped else {}
        return mapped | {name: torch.from_numpy(table) for name, table in tables}

    def maps(self) -> dict[str, Tensor]:
        """The offsets from draft ids to the teacher's, ``d2t`` int64 [draft_vocabulary]; nothing without a subset."""
        return {"d2t": self.ids - torch.arange(len(self.ids))} if self.config.mapped else {}

    def digest(self) -> str:
        """SHA-256, in hex, over config.json and the files of tensors."""
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
    for part in ("q", "k") if block.qk_norm else ():
        parts[f"{ours}.{part}_norm.weight"] = ((f"{theirs}.self_attn.{part}_norm.weight", (block.head_dim,)),)
    return parts


def end_parts(config: CachedConfig, vocabulary: Vocabulary, before: str = "") -> Parts:
    """The weights after the blocks; an output matrix cut from the teacher's has no keys. ``before`` is the prefix of
    the last norm's key."""
    hidden = config.block.hidden
    parts: Parts = {"draft_norm.weight": ((f"{before}norm.weight", (hidden,)),)}
    if config.has_head:
        head_keys = (("lm_head.weight", (vocabulary.head, hidden)),)
        parts["draft_head.weight"] = () if config.tied_head else head_keys
    return parts


def fitting_checkpoint(
    config_file: Path, config: Config, teacher: Checkpoint, parts: Parts, stored: DrafterTensors, vocabulary: Vocabulary
) -> CachedCheckpoint[Config]:
    """The checkpoint, if its files hold all that is expected; CheckpointError otherwise."""
    dtype = _dtype_of(stored.where, stored.entries, parts)
    ids = teacher_ids(stored.where, stored.entries, stored.read, vocabulary)
    return CachedCheckpoint((config_file, *stored.files), config, dtype, ids, teacher, parts, stored.read)


def _dtype_of(where: Path, entries: Mapping[str, Entry], parts: Parts) -> torch.dtype:
    """The dtype of the weights, if the file holds exactly the expected tensors, and d2t and t2d at most."""
    expected = {key: shape for keys in parts.values() for key, shape in keys}
    check_names(where, expected, {key: entry for key, entry in entries.items() if key not in MAPS}, _ADVICE)
    kinds = {check_kinds({key: entries[key]}) for key in expected}
    return DTYPES[kinds.pop()] if len(kinds) == 1 else torch.float32
