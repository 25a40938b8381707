"""A teacher in a Hugging Face folder of safetensors: its required files, and its tensors one at a time.

Opening looks at headers alone, so a checkpoint larger than memory can be checked.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from draftwood.compiler.checkpoints.fields import Fields, read_json
from draftwood.compiler.checkpoints.packed import Grouped, PackedMatrix, described_matrices, packed_matrices
from draftwood.compiler.checkpoints.packing import FILES as DESCRIPTIONS
from draftwood.compiler.checkpoints.packing import description_files, packing_of
from draftwood.compiler.checkpoints.safetensors_file import DTYPES, Entry, check_kinds, read_tensor, sha256_of
from draftwood.compiler.checkpoints.scheme import DESCRIPTION
from draftwood.compiler.checkpoints.sentencepiece_file import FILE as SENTENCEPIECE
from draftwood.compiler.checkpoints.sentencepiece_file import refuse
from draftwood.compiler.checkpoints.shards import check_names, folder_entries
from draftwood.compiler.checkpoints.weight import Shape, WeightParts, shapes_of
from draftwood.compiler.teachers.added_tokens import TEMPLATES, write_added, write_templates
from draftwood.compiler.teachers.config import DType, TeacherConfig
from draftwood.compiler.teachers.experts import as_stored
from draftwood.compiler.teachers.generation import sampling_of_folder
from draftwood.compiler.teachers.quantised import check_quantised, linear_layers, quantised_parts
from draftwood.compiler.teachers.registry import family_of, read_config
from draftwood.compiler.teachers.sentencepiece import write_sentencepiece
from draftwood.errors import CheckpointError
from draftwood.manifest import UsualSampling

# Files of tokenizers that transformers reads and that have no form here.
_UNREAD = ("vocab.json", "tekken.json", "*.tiktoken", "tiktoken.model")
# Linear layers that the publishers of packed teachers do not pack.
_UNPACKED = ("lm_head.weight", ".gate.weight")
# Rows of two matrices that are compared at a time, in double precision.
_COMPARED_ROWS = 4096
_WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")


@dataclass(frozen=True, slots=True)
class TeacherFolder:
    """A `draftwood.compiler.teachers.reader.Reader` of such a folder."""

    path: Path
    config: TeacherConfig
    entries: Mapping[str, Entry]
    parts: Mapping[str, WeightParts]
    # Published names of matrices that stand for several tensors: those in four or eight bits.
    packed: Mapping[str, PackedMatrix] = field(default_factory=dict)

    @classmethod
    def reads(cls, path: Path) -> bool:
        """True: whatever no other format reads is refused as a folder that lacks something."""
        return True

    @classmethod
    def open(cls, folder: Path) -> TeacherFolder:
        """Reads config.json and the header of every shard, and checks names, shapes and dtypes.

        Numbers are read in one case only: ``tie_word_embeddings`` is set and the files have an output matrix. If its
        numbers differ from the embedding's it is used, as in transformers.

        Raises:
            CheckpointError: the configuration is unsupported, or a file is missing or damaged. Or a tensor is missing,
                unexpected, of another shape, or of another dtype than the rest.
        """
        config, entries = read_config(folder), folder_entries(folder)
        if config.tied and _has_another_head(entries):
            config = replace(config, tied=False)
        family = family_of(config)
        parts = as_stored(_parts(folder, config), entries)
        stored = {name: entry for name, entry in entries.items() if not family.ignores(config, name)}
        packed = _packed(folder, shapes_of(parts), stored)
        if not (packed or config.quantised):
            _refuse_undescribed(stored)
        check_names(folder, _with_packed(shapes_of(parts), packed), stored)
        for matrix in packed.values():
            matrix.check_kinds(stored)
        of_packed = {name for matrix in packed.values() for name in matrix.shapes}
        plain = check_quantised(parts, {name: entry for name, entry in stored.items() if name not in of_packed})
        dtype = cast(DType, str(DTYPES[check_kinds(plain)]).removeprefix("torch."))
        return cls(folder, replace(config, dtype=dtype), stored, parts, packed)

    @classmethod
    def describe(cls, folder: Path) -> TeacherFolder:
        """The teacher that config.json describes, its weights unread and maybe absent; has no tensors.

        In a packed one all linear layers count as packed, except the output matrix and a mixture's router.
        """
        config = read_config(folder)
        parts = _parts(folder, config)
        path = folder / "config.json"
        packing, shapes = packing_of(Fields(path, read_json(path))), shapes_of(parts)
        names = [name for layer in linear_layers(parts) for name, _ in parts[f"{layer}.weight"].tensors]
        layers = {name: shapes[name] for name in names if not name.endswith(_UNPACKED)}
        return cls(folder, config, {}, parts, described_matrices(packing, layers) if packing else {})

    @classmethod
    def has_tokenizer(cls, folder: Path) -> bool:
        return any(_files(folder, name) for name in ("tokenizer.json", SENTENCEPIECE, *_UNREAD))

    @classmethod
    def write_tokenizer(cls, model: Path, folder: Path) -> bool:
        if not cls.has_tokenizer(model):
            return False
        if (model / "tokenizer.json").is_file():
            write_added(model, folder)
        elif (model / SENTENCEPIECE).is_file():
            write_sentencepiece(model, folder)
        else:
            refuse(next(path for name in _UNREAD for path in _files(model, name)), "a tokenizer that has no form here")
        write_templates(model, folder)
        return True

    @classmethod
    def usual_sampling(cls, folder: Path) -> UsualSampling:
        return sampling_of_folder(folder)

    @property
    def linkable(self) -> Mapping[str, Entry]:
        return self.entries

    def tensor(self, name: str) -> Tensor:
        if name in self.packed:
            return self.grouped(name).product()
        return read_tensor(self.entries[name].file, name)

    def grouped(self, name: str) -> Grouped:
        return self.packed[name].read(self.tensor)

    def digest(self) -> str:
        shards = sorted({entry.file for entry in self.entries.values()})
        described = [path for path in (self.path / DESCRIPTION,) if path.is_file()]
        return sha256_of([self.path / "config.json", *described, *description_files(self.path), *shards])

    def description(self) -> dict[str, Any]:
        return read_json(self.path / "config.json")

    def copy_texts(self, folder: Path) -> None:
        left = (*_WEIGHT_FILES, *DESCRIPTIONS)
        for path in self.path.iterdir():
            if path.is_file() and not path.name.endswith(left):
                shutil.copyfile(path, folder / path.name)
        if (self.path / TEMPLATES).is_dir():
            shutil.copytree(self.path / TEMPLATES, folder / TEMPLATES)


def _files(folder: Path, pattern: str) -> list[Path]:
    """The files of that name; a folder, or anything else that cannot be read like one, is none."""
    return [path for path in folder.glob(pattern) if path.is_file()]


def _has_another_head(entries: Mapping[str, Entry]) -> bool:
    """Whether there is an output matrix besides the embedding whose numbers are others.

    Some exporters store the alias of a tied head as well; so the numbers tell, not the flag.
    """
    embed, head = entries.get("model.embed_tokens.weight"), entries.get("lm_head.weight")
    if embed is None or head is None or embed.shape != head.shape:
        return embed is not None and head is not None
    left_VH = read_tensor(embed.file, "model.embed_tokens.weight")
    right_VH = read_tensor(head.file, "lm_head.weight")
    pieces = zip(left_VH.split(_COMPARED_ROWS), right_VH.split(_COMPARED_ROWS), strict=True)
    return not all(torch.equal(left.double(), right.double()) for left, right in pieces)


def _parts(folder: Path, config: TeacherConfig) -> dict[str, WeightParts]:
    return quantised_parts(family_of(config).parts(config), config.quantised, (folder / DESCRIPTION).is_file())


def _packed(folder: Path, shapes: Mapping[str, Shape], stored: Mapping[str, Entry]) -> dict[str, PackedMatrix]:
    path = folder / "config.json"
    packing = packing_of(Fields(path, read_json(path)))
    try:
        return packed_matrices(packing, shapes, stored) if packing else {}
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from None


def _refuse_undescribed(stored: Mapping[str, Entry]) -> None:
    """Raises CheckpointError if there are words, or numbers of eight bits, which a description alone explains."""
    for name, entry in stored.items():
        if entry.kind in ("I32", "I8", "U8") or entry.kind.startswith("F8"):
            raise CheckpointError(
                f"{entry.file}: {name} has dtype {entry.kind}, but config.json describes no quantisation; expected"
                f" {' or '.join(DTYPES)}; fetch the file that describes it, or take the original checkpoint"
            )


def _with_packed(shapes: Mapping[str, Shape], packed: Mapping[str, PackedMatrix]) -> dict[str, Shape]:
    """The expected tensors of the files: each packed matrix is replaced by its tensors."""
    expected: dict[str, Shape] = {}
    for name, shape in shapes.items():
        expected |= packed[name].shapes if name in packed else {name: shape}
    return expected
