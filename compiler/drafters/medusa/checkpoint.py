"""Medusa heads as people publish them, checked against a teacher, and written for vLLM; ``layouts`` lists the layouts.

The original repeats one module, so its blocks share weights; each is stored, and read, on its own. An extension of
ours: when no head has an output matrix the heads are *tied* and use the teacher's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftwood.compiler.checkpoints.fields import Fields, read_json
from draftwood.compiler.checkpoints.safetensors_file import DTYPES, check_kinds, sha256_of
from draftwood.compiler.checkpoints.tensors import Reader
from draftwood.compiler.drafters.common.export import dtype_name
from draftwood.compiler.drafters.medusa.layouts import TOKEN_MAP, Heads, open_heads
from draftwood.compiler.drafters.medusa.network import MedusaConfig
from draftwood.compiler.drafters.model import DrafterFolder
from draftwood.compiler.teachers.checkpoint import Checkpoint
from draftwood.compiler.teachers.config import TeacherConfig
from draftwood.errors import CheckpointError

_MOST = 1000  # heads, and blocks of one
_NUMBER = r"(0|[1-9][0-9]{0,3})"
_KEY = re.compile(rf"{_NUMBER}\.{_NUMBER}\.(linear\.weight|linear\.bias|weight)")


@dataclass(frozen=True, slots=True)
class MedusaCheckpoint:
    """Medusa heads that fit their teacher; head i proposes the token i + 2 places on (0-based)."""

    files: tuple[Path, ...]
    # Heads and blocks are counted from the tensors: published config.json files state other numbers.
    config: MedusaConfig
    dtype: torch.dtype
    # Our weight name -> the file's key.
    parts: Mapping[str, str]
    read: Reader
    # The teacher's id of every draft id, int64, if not all of the teacher's ids are drafted.
    ids: Tensor | None = None
    # Whether the heads stand among the tensors of a whole teacher.
    whole: bool = False

    @classmethod
    def open(cls, path: Path, teacher: TeacherConfig) -> MedusaCheckpoint:
        """Opens a folder or a file of heads.

        Raises:
            CheckpointError: the file is missing, damaged or holds more than tensors. Or a key, a shape, a dtype or the
                numbering of heads and blocks does not fit the teacher and the layout.
        """
        stored = open_heads(path)
        where = stored.where
        heads = _group(where, stored.plain)
        blocks, tied, bias = _check_heads(where, heads)
        ids = _token_ids(stored, teacher) if stored.token_map else None
        config = MedusaConfig(len(heads), blocks, tied, bias, None if ids is None else len(ids))
        if tied and ids is not None:
            raise CheckpointError(f"{where}: has a token_map and no output matrices; expected both or neither")
        keys = _names(config)
        _check_shapes(teacher, config, keys, stored)
        dtype = DTYPES[check_kinds({key: stored.entries[key] for key in stored.plain.values()})]
        parts = {our: stored.plain[key] for our, key in keys.items()}
        return cls(stored.files, config, dtype, parts, stored.read, ids, stored.whole)

    @classmethod
    def describe(cls, path: Path) -> MedusaCheckpoint:
        """Heads as a folder's config.json counts them, their weights unread and maybe absent; untied, in bf16."""
        fields = Fields(path / "config.json", read_json(path / "config.json"))
        heads, blocks = fields.whole("medusa_num_heads"), fields.whole("medusa_num_layers")
        if not 1 <= heads <= _MOST or not 0 <= blocks <= _MOST:
            raise CheckpointError(f"{fields.path}: {heads} heads of {blocks} blocks; expected 1 to {_MOST} heads")

        def absent(key: str) -> Tensor:
            raise CheckpointError(f"{path}: {key} cannot be read; the heads were described and not opened")

        config = MedusaConfig(heads, blocks, False)
        return cls((fields.path,), config, torch.bfloat16, _names(config), absent)

    def names(self) -> list[str]:
        """Our weight names: ``heads.{i}.blocks.{j}.weight``, ``.bias`` and ``heads.{i}.out.weight``."""
        return list(self.parts)

    def keys(self, name: str) -> tuple[str, ...]:
        """The file's key of a weight."""
        return (self.parts[name],)

    def stored(self, key: str) -> Tensor:
        """A tensor under its key in the file."""
        return self.read(key)

    def weight(self, name: str) -> Tensor:
        """A weight under our name: blocks [H, H] and [H], output matrices [V, H], cut to the ids that are drafted."""
        value = self.read(self.parts[name])
        cut = self.ids is not None and name.endswith(".out.weight") and len(value) != len(self.ids)
        return value.index_select(0, self.ids) if cut and self.ids is not None else value

    def buffers(self, positions: int) -> dict[str, Tensor]:
        """The map to the teacher's ids, if there is one."""
        return {} if self.ids is None else {"teacher_ids": self.ids}

    def maps(self) -> dict[str, Tensor]:
        """``token_map``, if there is one."""
        return {} if self.ids is None else {"token_map": self.ids}

    def digest(self) -> str:
        """SHA-256, in hex, over the files."""
        return sha256_of(self.files)


def _token_ids(heads: Heads, teacher: TeacherConfig) -> Tensor:
    assert heads.token_map is not None
    entry = heads.entries[heads.token_map]
    if entry.kind not in ("I64", "I32") or len(entry.shape) != 1 or not entry.shape[0]:
        raise CheckpointError(f"{heads.where}: token_map is {entry.kind} {list(entry.shape)}; expected I64 ids")
    ids = heads.read(heads.token_map).long()
    if int(ids.min()) < 0 or int(ids.max()) >= teacher.vocabulary or len(ids.unique()) != len(ids):
        raise CheckpointError(
            f"{heads.where}: token_map has ids from {int(ids.min())} to {int(ids.max())}, {len(ids.unique())} of"
            f" {len(ids)} different; expected each id once, from 0 to {teacher.vocabulary - 1}"
        )
    return ids


def _group(file: Path, plain: Mapping[str, str]) -> dict[int, dict[int, set[str]]]:
    """Head -> layer -> what it holds, from the keys without their prefix."""
    heads: dict[int, dict[int, set[str]]] = {}
    for key, stored in plain.items():
        if (match := _KEY.fullmatch(key)) is None:
            raise CheckpointError(
                f"{file}: unexpected key {stored}; expected {{i}}.{{j}}.linear.weight,"
                " {i}.{j}.linear.bias or {i}.{n}.weight, with or without 'medusa_head.'; save the heads alone"
            )
        heads.setdefault(int(match[1]), {}).setdefault(int(match[2]), set()).add(match[3])
    if not heads:
        raise CheckpointError(f"{file}: holds no tensors; expected at least head 0")
    return heads


def _check_heads(file: Path, heads: Mapping[int, Mapping[int, set[str]]]) -> tuple[int, bool, bool]:
    """Residual blocks a head, whether the heads are tied, and whether blocks have a bias: all must look like head 0."""
    for head in range(len(heads)):
        if head not in heads:
            raise CheckpointError(f"{file}: head {head} is missing; expected heads 0 to {max(heads)} without a gap")
    tied = not any("weight" in parts for parts in heads[0].values())
    blocks = len(heads[0]) if tied else len(heads[0]) - 1
    bias = not blocks or any("linear.bias" in parts for parts in heads[0].values())
    block = {"linear.weight", "linear.bias"} if bias else {"linear.weight"}
    expected = dict.fromkeys(range(blocks), block) | ({} if tied else {blocks: {"weight"}})
    for head, layers in heads.items():
        for layer in sorted(expected.keys() | layers.keys()):
            got, want = layers.get(layer, set()), expected.get(layer, set())
            if got != want:
                raise CheckpointError(
                    f"{file}: {head}.{layer} holds {_listed(got)}; expected {_listed(want)}, since every head"
                    f" must have {blocks} blocks and {'no' if tied else 'an'} output matrix, like head 0"
                )
    return blocks, tied, bias


def _listed(parts: set[str]) -> str:
    return " and ".join(sorted(parts)) or "nothing"


def _names(config: MedusaConfig) -> dict[str, str]:
    """Our name -> the key that FasterDecoding gives it."""
    names = {}
    for i in range(config.heads):
        for j in range(config.blocks):
            for kind in ("weight", "bias") if config.bias else ("weight",):
                names[f"heads.{i}.blocks.{j}.{kind}"] = f"{i}.{j}.linear.{kind}"
        if not config.tied:
            names[f"heads.{i}.out.weight"] = f"{i}.{config.blocks}.weight"
    return names


def _check_shapes(teacher: TeacherConfig, config: MedusaConfig, keys: Mapping[str, str], heads: Heads) -> None:
    hidden = teacher.hidden
    for name, key in keys.items():
        entry = heads.entries[heads.plain[key]]
        square = (hidden,) if name.endswith(".bias") else (hidden, hidden)
        shape = (teacher.vocabulary, hidden) if name.endswith(".out.weight") else square
        cut = name.endswith(".out.weight") and entry.shape == (config.vocabulary, hidden)
        if entry.shape != shape and not cut:
            raise CheckpointError(
                f"{entry.file}: {heads.plain[key]} has shape {list(entry.shape)}; expected {list(shape)}"
                f" for a teacher of hidden size {hidden} and vocabulary {teacher.vocabulary};"
                " use the heads that were trained on this teacher"
            )


def vllm(opened: MedusaCheckpoint, teacher: Checkpoint, verifier: str) -> DrafterFolder:
    """The heads as vLLM reads them; ``verifier`` is the teacher's name."""
    config, vocabulary = opened.config, teacher.config.vocabulary
    fields: dict[str, Any] = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": teacher.config.hidden,
        "vocab_size": vocabulary,
        "truncated_vocab_size": vocabulary if opened.ids is None else len(opened.ids),
        "num_heads": config.heads,
        "num_hidden_layers": config.blocks,
        "medusa_fc_bias": config.bias,
        "original_lm_head": config.tied,
        "base_model_name_or_path": verifier,
        "torch_dtype": dtype_name(opened.dtype),
    }
    tensors: dict[str, Tensor] = {} if opened.ids is None else {TOKEN_MAP: opened.ids.clone()}
    for i in range(config.heads):
        for j, kind, tensor in _blocks(opened, i):
            tensors[f"blocks.{i}.layers.{j}.{kind}"] = tensor
        tensors["lm_head.weight" if config.tied else f"lm_heads.{i}.weight"] = _output(opened, teacher, i)
    return DrafterFolder(fields, tensors)


def _blocks(opened: MedusaCheckpoint, head: int) -> Iterator[tuple[int, str, Tensor]]:
    for j in range(opened.config.blocks):
        for kind in ("weight", "bias") if opened.config.bias else ("weight",):
            yield j, kind, opened.weight(f"heads.{head}.blocks.{j}.{kind}").contiguous()


def _output(opened: MedusaCheckpoint, teacher: Checkpoint, head: int) -> Tensor:
    """The output matrix [V, H] of a head; for tied heads a copy of the teacher's."""
    if not opened.config.tied:
        return opened.weight(f"heads.{head}.out.weight").contiguous()
    matrix_VH = teacher.matrix("embed.weight" if teacher.config.tied else "lm_head.weight")
    return matrix_VH.to(opened.dtype).clone(memory_format=torch.contiguous_format)
