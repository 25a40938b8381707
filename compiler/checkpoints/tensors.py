"""The tensors of a drafter's file, in any of its containers."""

from __future__ import annotations

import pickle  # for the name of torch's refusal only
import pickletools
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from draftwood.compiler.checkpoints.safetensors_file import DTYPES, Entry, finite, read_header, read_tensor
from draftwood.compiler.checkpoints.shards import folder_entries
from draftwood.errors import CheckpointError
from draftwood.files import open_regular

_WHOLE = {torch.int64: "I64", torch.int32: "I32", torch.uint8: "U8", torch.bool: "BOOL"}
_KINDS = {dtype: kind for kind, dtype in DTYPES.items()} | _WHOLE
_FILES = ("model.safetensors", "pytorch_model.bin")

_LONGEST_NAME, _MOST_PICKLE = 1000, 64 << 20

# Read by key as the file spells it.
Reader = Callable[[str], Tensor]


class DrafterTensors(NamedTuple):
    """A drafter's folder, the file or folder of its tensors, and the tensors by key; errors name ``where``: one file,
    or the folder."""

    folder: Path
    where: Path
    files: tuple[Path, ...]
    entries: dict[str, Entry]
    read: Reader


def open_stored(path: Path, drafter: str) -> DrafterTensors:
    """The tensors of a drafter's folder, in one file or in shards, or of its file; CheckpointError names what is
    looked for, or a quantised tensor."""
    stored = _stored(path, drafter)
    for name, entry in stored.entries.items():
        eight = "8" in entry.kind and entry.kind != "U8"  # of whole numbers or floats, as safetensors or torch spell it
        if eight or name.endswith((".qweight", ".weight_packed")):
            raise CheckpointError(
                f"{entry.file}: {name} has dtype {entry.kind}; expected one of {', '.join(DTYPES)} of a drafter, which"
                " build --int8-drafter rounds by itself; take the original one"
            )
    return stored


def _stored(path: Path, drafter: str) -> DrafterTensors:
    if path.is_file() and path.suffix in (".safetensors", ".bin", ".pt"):
        return DrafterTensors(path.parent, path, (path,), *open_tensors(path))
    sharded = (path / "model.safetensors.index.json").is_file()
    for name in _FILES[:1] if sharded else _FILES:  # as in transformers, shards come before a torch file
        if (path / name).is_file():
            return DrafterTensors(path, path / name, (path / name,), *open_tensors(path / name))
    if not sharded:
        expected = f"a folder with {' or '.join(_FILES)}, or shards of safetensors"
        if any(path.glob("pytorch_model-*.bin")):
            expected += "; shards of torch files are not read: save them as one"
        raise CheckpointError(f"{path}: no {drafter} drafter; expected {expected}")
    entries = folder_entries(path)
    files = tuple(sorted({entry.file for entry in entries.values()}))
    return DrafterTensors(path, path, files, entries, lambda key: read_tensor(entries[key].file, key))


def _check_names(file: Path) -> None:
    """Refuses a torch file whose pickle holds very long texts; nothing of it is executed or built.

    torch looks through its own refusal, which quotes them, in a time that grows with the square of their length.
    """
    open_regular(file).close()
    with zipfile.ZipFile(file) as archive:
        for member in archive.infolist():
            if not member.filename.endswith("data.pkl"):
                continue
            if member.file_size > _MOST_PICKLE:
                raise ValueError(f"{member.filename} has {member.file_size} bytes")
            for _, argument, _ in pickletools.genops(archive.read(member)):
                if isinstance(argument, (str, bytes)) and len(argument) > _LONGEST_NAME:
                    raise ValueError(f"{member.filename} holds a text of {len(argument)} characters")


def open_tensors(file: Path) -> tuple[dict[str, Entry], Reader]:
    """The file's entries, and a reader. Pickles go through torch's restricted reader: nothing can run."""
    if file.suffix == ".safetensors":
        return read_header(file), lambda key: read_tensor(file, key)
    try:
        _check_names(file)
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError:
        raise CheckpointError(
            f"{file}: holds objects other than tensors, which could run code; expected a dict of tensors;"
            " do not load it, ask for a safetensors file"
        ) from None
    except Exception as error:  # what a damaged pickle says to its reader may fail in any way
        reason = (str(error).splitlines() or [type(error).__name__])[0][:160]
        raise CheckpointError(f"{file}: not a whole torch zip file ({reason}); save it as safetensors") from None
    if not isinstance(state, dict) or not all(isinstance(t, Tensor) for t in state.values()):
        raise CheckpointError(f"{file}: holds no plain dict of tensors; expected the state dict of the drafter alone")
    kinds = {key: _KINDS.get(tensor.dtype, str(tensor.dtype)) for key, tensor in state.items()}
    entries = {str(key): Entry(file, tuple(tensor.shape), kinds[key]) for key, tensor in state.items()}
    tensors = {str(key): tensor for key, tensor in state.items()}
    return entries, lambda key: finite(file, key, tensors[key])
