"""Medusa heads as people publish them, checked against a teacher.

Layout (FasterDecoding/Medusa): ``{i}.{j}.linear.{weight,bias}`` are the residual blocks of head i and
``{i}.{n}.weight`` its output matrix [vocabulary, hidden], n being the number of blocks. The original repeats
one module, so its blocks share weights; each is stored, and read, on its own. An extension of ours: when no
head has an output matrix the heads are *tied* and use the teacher's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from draftwood.compiler.checkpoints.fields import Fields, read_json
from draftwood.compiler.checkpoints.safetensors_file import DTYPES, Entry, check_kinds, sha256_of
from draftwood.compiler.checkpoints.tensors import Reader, open_tensors
from draftwood.compiler.teachers.config import TeacherConfig
from draftwood.errors import CheckpointError

MEDUSA_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
_MOST = 1000  # heads, and blocks of one
_PREFIX = "medusa_head."
_NUMBER = r"(0|[1-9][0-9]{0,3})"
_KEY = re.compile(rf"{_NUMBER}\.{_NUMBER}\.(linear\.weight|linear\.bias|weight)")


@dataclass(frozen=True, slots=True)
class MedusaCheckpoint:
    """Medusa heads that fit their teacher; head i proposes the token i + 2 places on (0-based)."""

    file: Path
    # Heads, counted from the tensors: published config.json files state other numbers.
    heads: int
    # Residual blocks a head, possibly none.
    blocks: int
    # Whether the teacher's output matrix serves every head.
    tied: bool
    dtype: torch.dtype
    # Our weight name -> the file's key.
    parts: Mapping[str, str]
    read: Reader

    @classmethod
    def open(cls, path: Path, teacher: TeacherConfig) -> MedusaCheckpoint:
        """Opens a folder with medusa_lm_head.safetensors or .pt, or such a file.

        Raises:
            CheckpointError: the file is missing, damaged or holds more than tensors; or a key, a shape, a
                dtype or the numbering of heads and blocks is not what the teacher and the layout ask for.
        """
        file = _find(path)
        entries, read = open_tensors(file)
        plain = {key.removeprefix(_PREFIX): key for key in entries}
        if len(plain) != len(entries):
            raise CheckpointError(
                f"{file}: has keys with and without {_PREFIX!r} for one tensor; expected one of the two"
            )
        heads = _group(file, plain)
        blocks, tied = _check_heads(file, heads)
        keys = _names(len(heads), blocks, tied)
        _check_shapes(teacher, keys, {key: entries[stored] for key, stored in plain.items()})
        dtype = DTYPES[check_kinds(entries)]
        return cls(file, len(heads), blocks, tied, dtype, {our: plain[key] for our, key in keys.items()}, read)

    @classmethod
    def describe(cls, path: Path) -> MedusaCheckpoint:
        """Heads as a folder's config.json counts them, their weights unread and maybe absent; untied, in bf16."""
        fields = Fields(path / "config.json", read_json(path / "config.json"))
        heads, blocks = fields.whole("medusa_num_heads"), fields.whole("medusa_num_layers")
        if not 1 <= heads <= _MOST or not 0 <= blocks <= _MOST:
            raise CheckpointError(f"{fields.path}: {heads} heads of {blocks} blocks; expected 1 to {_MOST} heads")

        def absent(key: str) -> Tensor:
            raise CheckpointError(f"{path}: {key} cannot be read; the heads were described and not opened")

        return cls(fields.path, heads, blocks, False, torch.bfloat16, _names(heads, blocks, False), absent)

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
        """A weight under our name, as stored: blocks [H, H] and [H], output matrices [V, H]."""
        return self.read(self.parts[name])

    def buffers(self, positions: int) -> dict[str, Tensor]:
        """Heads have none."""
        return {}

    def maps(self) -> dict[str, Tensor]:
        """Heads rank the teacher's own vocabulary."""
        return {}

    def digest(self) -> str:
        """SHA-256, in hex, over the file."""
        return sha256_of([self.file])


def _find(path: Path) -> Path:
    if path.is_file() and path.suffix in (".safetensors", ".pt"):
        return path
    for name in MEDUSA_FILES:
        if (path / name).is_file():
            return path / name
    raise CheckpointError(f"{path}: no Medusa heads; expected {' or '.join(MEDUSA_FILES)}, or a folder with one")


def _group(file: Path, plain: Mapping[str, str]) -> dict[int, dict[int, set[str]]]:
    """Head -> layer -> what it holds, from the keys without their prefix."""
    heads: dict[int, dict[int, set[str]]] = {}
    for key, stored in plain.items():
        if (match := _KEY.fullmatch(key)) is None:
            raise CheckpointError(
                f"{file}: unexpected key {stored}; expected {{i}}.{{j}}.linear.weight,"
                f" {{i}}.{{j}}.linear.bias or {{i}}.{{n}}.weight, with or without {_PREFIX!r};"
                " save the heads alone"
            )
        heads.setdefault(int(match[1]), {}).setdefault(int(match[2]), set()).add(match[3])
    if not heads:
        raise CheckpointError(f"{file}: holds no tensors; expected at least head 0")
    return heads


def _check_heads(file: Path, heads: Mapping[int, Mapping[int, set[str]]]) -> tuple[int, bool]:
    """Residual blocks a head, and whether the heads are tied: every head must look like head 0."""
    for head in range(len(heads)):
        if head not in heads:
            raise CheckpointError(f"{file}: head {head} is missing; expected heads 0 to {max(heads)} without a gap")
    tied = not any("weight" in parts for parts in heads[0].values())
    blocks = len(heads[0]) if tied else len(heads[0]) - 1
    wanted = {j: {"linear.weight", "linear.bias"} for j in range(blocks)} | ({} if tied else {blocks: {"weight"}})
    for head, layers in heads.items():
        for layer in sorted(wanted.keys() | layers.keys()):
            got, want = layers.get(layer, set()), wanted.get(layer, set())
            if got != want:
                raise CheckpointError(
                    f"{file}: {head}.{layer} holds {_listed(got)}; expected {_listed(want)}, for every head"
                    f" must have {blocks} blocks and {'no' if tied else 'an'} output matrix, like head 0"
                )
    return blocks, tied


def _listed(parts: set[str]) -> str:
    return " and ".join(sorted(parts)) or "nothing"


def _names(heads: int, blocks: int, tied: bool) -> dict[str, str]:
    """Our name -> the file's key without its prefix."""
    names = {}
    for i in range(heads):
        for j in range(blocks):
            for kind in ("weight", "bias"):
                names[f"heads.{i}.blocks.{j}.{kind}"] = f"{i}.{j}.linear.{kind}"
        if not tied:
            names[f"heads.{i}.out.weight"] = f"{i}.{blocks}.weight"
    return names


def _check_shapes(teacher: TeacherConfig, keys: Mapping[str, str], entries: Mapping[str, Entry]) -> None:
    hidden = teacher.hidden
    for name, key in keys.items():
        square = (hidden,) if name.endswith(".bias") else (hidden, hidden)
        shape = (teacher.vocabulary, hidden) if name.endswith(".out.weight") else square
        if entries[key].shape != shape:
            raise CheckpointError(
                f"{entries[key].file}: {key} has shape {list(entries[key].shape)}; expected {list(shape)}"
                f" for a teacher of hidden size {hidden} and vocabulary {teacher.vocabulary};"
                " use the heads that were trained on this teacher"
            )
