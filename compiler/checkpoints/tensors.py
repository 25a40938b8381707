"""The tensors of a drafter's file, whatever its container."""

from __future__ import annotations

import pickle  # for the name of torch's refusal only
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from draftwood.compiler.checkpoints.safetensors_file import DTYPES, Entry, finite, read_header, read_tensor
from draftwood.errors import CheckpointError

_KINDS = {dtype: kind for kind, dtype in DTYPES.items()} | {torch.int64: "I64", torch.bool: "BOOL"}
_FILES = ("model.safetensors", "pytorch_model.bin")

# Read by key as the file spells it.
Reader = Callable[[str], Tensor]


def find_file(path: Path, drafter: str) -> tuple[Path, Path]:
    """(folder, file of tensors) of a drafter's folder or file; CheckpointError names what was looked for."""
    if path.is_file() and path.suffix in (".safetensors", ".bin", ".pt"):
        return path.parent, path
    for name in _FILES:
        if (path / name).is_file():
            return path, path / name
    raise CheckpointError(f"{path}: no {drafter} drafter; expected a folder with {' or '.join(_FILES)}")


def open_tensors(file: Path) -> tuple[dict[str, Entry], Reader]:
    """What the file holds, and a reader of it. Pickles go through torch's restricted reader: nothing can run."""
    if file.suffix == ".safetensors":
        return read_header(file), lambda key: read_tensor(file, key)
    try:
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
