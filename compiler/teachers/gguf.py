"""A teacher in a GGUF file, or in a file of several parts: llama.cpp's blocks, read one tensor at a time."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftwood.compiler.checkpoints import gguf_blocks as blocks
from draftwood.compiler.checkpoints.blocks import BLOCK
from draftwood.compiler.checkpoints.fields import Fields
from draftwood.compiler.checkpoints.gguf_header import Header, StoredTensor, read_header
from draftwood.compiler.checkpoints.packed import Grouped
from draftwood.compiler.checkpoints.safetensors_file import Entry, finite, is_finite, sha256_of
from draftwood.compiler.checkpoints.weight import Shape, WeightParts, shapes_of
from draftwood.compiler.teachers import generation
from draftwood.compiler.teachers.config import TeacherConfig
from draftwood.compiler.teachers.gguf_config import ROPE_FACTORS, description, place_of, turned
from draftwood.compiler.teachers.gguf_tokenizer import write_tokenizer
from draftwood.compiler.teachers.registry import config_of, family_of
from draftwood.errors import CheckpointError
from draftwood.manifest import UsualSampling

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class BlockMatrix:
    """A `draftwood.compiler.teachers.reader.WholeMatrix` of blocks of 32 inputs."""

    kind: str
    module: str
    shape: Shape

    @property
    def title(self) -> str:
        return f"GGUF {self.kind}"

    @property
    def bits(self) -> int:
        return blocks.bits(self.kind)

    @property
    def groups(self) -> int:
        return self.shape[1] // BLOCK

    @property
    def minimum(self) -> bool:
        return blocks.has_minimum(self.kind)

    @property
    def middle(self) -> bool:
        return not self.minimum or self.bits == 8

    @property
    def rounds(self) -> bool:
        return not blocks.exact(self.kind)


@dataclass(frozen=True, slots=True)
class Gguf:
    """A `draftwood.compiler.teachers.reader.Reader` of such files."""

    path: Path
    files: tuple[Path, ...]
    header: Header
    described: Mapping[str, Any]
    config: TeacherConfig
    parts: Mapping[str, WeightParts]
    entries: Mapping[str, Entry]
    packed: Mapping[str, BlockMatrix]

    @classmethod
    def reads(cls, path: Path) -> bool:
        return bool(gguf_files(path))

    @classmethod
    def open(cls, path: Path) -> Gguf:
        """Reads the headers of all parts.

        Raises:
            CheckpointError: an architecture or blocks that are not supported, or tensors that do not fit.
        """
        files = gguf_files(path)
        header = _joined([read_header(file) for file in files])
        factors = _numbers(header.tensors[ROPE_FACTORS]).flatten() if ROPE_FACTORS in header.tensors else None
        described = description(header, factors)
        config = config_of(Fields(header.path, described))
        parts = family_of(config).parts(config)
        shapes = shapes_of(parts)
        _check(header, shapes)
        places = {name: header.tensors[place_of(name).name] for name in shapes}
        entries = {name: Entry(stored.file, shapes[name], stored.kind) for name, stored in places.items()}
        packed = {
            name: BlockMatrix(entry.kind, name.rpartition(".")[0], entry.shape)
            for name, entry in entries.items()
            if len(entry.shape) == 2 and entry.kind not in blocks.PLAIN and not entry.shape[1] % BLOCK
        }
        return cls(path, files, header, described, config, parts, entries, packed)

    @classmethod
    def describe(cls, path: Path) -> Gguf:
        """Does as ``open``: such a file describes itself and has its tensors."""
        return cls.open(path)

    @classmethod
    def has_tokenizer(cls, path: Path) -> bool:
        return read_header(gguf_files(path)[0]).fields.get("tokenizer.ggml.model", "none") != "none"

    @classmethod
    def write_tokenizer(cls, path: Path, folder: Path) -> bool:
        return write_tokenizer(read_header(gguf_files(path)[0]), folder)

    @classmethod
    def usual_sampling(cls, path: Path) -> UsualSampling:
        return generation.sampling_of_gguf(read_header(gguf_files(path)[0]))

    @property
    def linkable(self) -> Mapping[str, Entry]:
        return {}

    def tensor(self, name: str) -> Tensor:
        rows, kind = self._rows(name)
        entry = self.entries[name]
        return finite(entry.file, name, blocks.numbers(rows, kind).view(entry.shape))

    def grouped(self, name: str) -> Grouped:
        rows, kind = self._rows(name)
        entry = self.entries[name]
        whole = blocks.whole_numbers(rows, entry.shape, kind)
        if not is_finite(whole.scale_OG * (1 << whole.bits)) or not _all_numbers(whole.minimum_OG):
            raise CheckpointError(f"{entry.file}: {name} has a scale that is no number; fetch the file again")
        return whole

    def digest(self) -> str:
        return sha256_of(self.files)

    def description(self) -> dict[str, Any]:
        return dict(self.described)

    def copy_texts(self, folder: Path) -> None:
        write_tokenizer(self.header, folder)
        if (sampling := generation.sampling_of_gguf(self.header)) != UsualSampling():
            (folder / generation.FILE).write_bytes(msgspec.json.encode(sampling))

    def _rows(self, name: str) -> tuple[NDArray[np.uint8], str]:
        """The bytes of a tensor's rows, as transformers orders them, and the kind of their blocks."""
        place = place_of(name)
        stored = self.header.tensors[place.name]
        rows = _bytes(stored)
        if place.expert is not None:
            rows = rows.reshape(self._experts, -1, rows.shape[1])[place.expert]
        if not turned(self.header.fields["general.architecture"], place):
            return rows, stored.kind
        # A row for each output; a bias lies in one, and has as many numbers as a matrix has rows.
        pairs = rows.reshape(-1, self.config.head_dim // 2, 2, rows.size // stored.shape[0])
        return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape), stored.kind

    @property
    def _experts(self) -> int:
        return int(getattr(self.config, "experts", 1))


def gguf_files(path: Path) -> tuple[Path, ...]:
    """The files of the GGUF model that a path names, in order; none if it names no such model.

    Raises:
        CheckpointError: a folder with several models, or a part that is missing.
    """
    if path.suffix == ".gguf":
        return _parts_of(path)
    inside = sorted(path.glob("*.gguf")) if path.is_dir() and not any(path.glob("*.safetensors")) else []
    models = {match[1] if (match := _PART.fullmatch(file.name)) else file.name: file for file in inside}
    if len(models) > 1:
        names = ", ".join(file.name for file in list(models.values())[:3])
        raise CheckpointError(f"{path}: holds {len(models)} GGUF models ({names}); name one of the files")
    return _parts_of(next(iter(models.values()))) if models else ()


def _parts_of(path: Path) -> tuple[Path, ...]:
    match = _PART.fullmatch(path.name)
    if match is None:
        return (path,)
    count = int(match[3])
    files = tuple(path.with_name(f"{match[1]}-{i:05}-of-{match[3]}.gguf") for i in range(1, count + 1))
    missing = next((file for file in files if not file.is_file()), None)
    if missing is not None or not files:
        raise CheckpointError(f"{missing or path}: no such file; expected all {count} parts of {match[1]}; fetch it")
    return files


def _joined(headers: list[Header]) -> Header:
    """One header of all parts: the metadata of the first, the tensors of all."""
    first, tensors = headers[0], dict[str, StoredTensor]()
    for number, header in enumerate(headers):
        split = header.fields.get("split.no", 0), header.fields.get("split.count", 1) or 1
        if split != (number, len(headers)):
            raise CheckpointError(
                f"{header.path}: is part {split[0]} of {split[1]} by its metadata; expected {number} of {len(headers)};"
                " fetch the parts again"
            )
        if twice := sorted(tensors.keys() & header.tensors.keys()):
            raise CheckpointError(f"{header.path}: has tensor {twice[0]} of an earlier part; fetch the parts again")
        tensors |= header.tensors
    return Header(first.path, first.fields, tensors)


def _check(header: Header, shapes: Mapping[str, Shape]) -> None:
    """Raises CheckpointError for a tensor that is missing, unexpected, or of another shape or unreadable blocks."""
    expected = dict[str, Shape]()
    for name, shape in shapes.items():
        place = place_of(name)
        experts = 0 if place.expert is None else 1 + max(place.expert, expected.get(place.name, (0,))[0] - 1)
        expected[place.name] = (experts, *shape) if experts else shape
    known = blocks.readable()
    if missing := [name for name in expected if name not in header.tensors]:
        raise CheckpointError(
            f"{header.path}: {len(missing)} tensors missing, first {missing[0]}; expected it with shape"
            f" {list(expected[missing[0]])}; fetch the whole file"
        )
    if extra := sorted(header.tensors.keys() - expected.keys() - {ROPE_FACTORS}):
        raise CheckpointError(
            f"{header.path}: {len(extra)} tensors that its metadata does not explain: {', '.join(extra[:3])}; expected"
            " a plain decoder; adapters and extra heads must be merged or removed"
        )
    for name, stored in header.tensors.items():
        if stored.kind not in known:
            raise CheckpointError(
                f"{stored.file}: {name} has blocks {stored.kind}; expected one of {', '.join(sorted(known))}"
            )
        if name in expected and stored.shape != expected[name]:
            raise CheckpointError(
                f"{stored.file}: {name} has shape {list(stored.shape)}; expected {list(expected[name])} by its metadata"
            )


def _bytes(stored: StoredTensor) -> NDArray[np.uint8]:
    """The bytes of a tensor's rows, mapped."""
    rows = int(np.prod(stored.shape[:-1], dtype=np.int64))
    return np.memmap(stored.file, np.uint8, "r", stored.start, (rows, stored.bytes // rows))


def _all_numbers(value: Tensor | None) -> bool:
    return value is None or is_finite(value)


def _numbers(stored: StoredTensor) -> Tensor:
    if stored.kind not in blocks.readable():
        raise CheckpointError(f"{stored.file}: {ROPE_FACTORS} has blocks {stored.kind}; expected F32")
    return torch.as_tensor(blocks.numbers(_bytes(stored), stored.kind))
