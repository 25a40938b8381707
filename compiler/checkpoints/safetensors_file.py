"""One safetensors file: its content, from its header alone, and its tensors one at a time."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from draftwood.errors import CheckpointError
from draftwood.files import open_regular, whole

# As safetensors spells them.
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True, slots=True)
class Entry:
    """A stored tensor's place, with its shape and its element type as safetensors spells it ("BF16")."""

    file: Path
    shape: tuple[int, ...]
    kind: str


def read_header(file: Path) -> dict[str, Entry]:
    """A safetensors file's entries, from its header alone; CheckpointError if it is missing or damaged."""
    try:
        open_regular(file).close()  # safe_open would wait for a FIFO's writer
        with safe_open(file, framework="pt") as opened:
            names = opened.keys()
            slices = {name: opened.get_slice(name) for name in names}
            return {n: Entry(file, tuple(s.get_shape()), s.get_dtype()) for n, s in slices.items()}
    except FileNotFoundError:
        raise CheckpointError(f"{file}: no such file; fetch the whole checkpoint") from None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: not a whole safetensors file ({error}); fetch it again") from None


def byte_offset(file: Path, name: str) -> int:
    """The offset of a tensor's first byte in a safetensors file that has passed ``read_header``."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        begin: int = json.loads(stream.read(length))[name]["data_offsets"][0]
    return 8 + length + begin


def read_tensor(file: Path, name: str) -> Tensor:
    """One tensor of a safetensors file, as stored.

    Raises:
        CheckpointError: the file changed after the check, or the tensor holds NaN or an infinity.
    """
    try:
        with safe_open(file, framework="pt") as opened:
            return finite(file, name, cast(Tensor, opened.get_tensor(name)))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: {name} cannot be read any more ({error}); open it again") from None


def write_tensors(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes a file of tensors, which is there once it is whole, and may be read by whoever may read other new files
    here. The library's own file is its owner's alone, and a server that runs as another user cannot open it.

    Raises:
        OSError: the disk is full, say.
    """
    with whole(file) as begun:
        part, rights = Path(begun.name), os.fstat(begun.fileno()).st_mode
        try:
            save_file(dict(tensors), part, metadata={"format": "pt"})
        except SafetensorError as error:
            raise _of_the_system(error, file) from error
        part.chmod(rights)


def _of_the_system(error: SafetensorError, file: Path) -> Exception:
    """The system's error that the library tells of, or its own."""
    number = re.search(r"\(os error (\d+)\)", str(error))
    return OSError(int(number[1]), os.strerror(int(number[1])), str(file)) if number else error


def map_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file of our own as views of a memory map: nothing is read until used."""
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)


def finite(file: Path, name: str, value: Tensor) -> Tensor:
    """The tensor back, if all of it is numbers; read once, and nothing of its size is made."""
    if not is_finite(value):
        at = (~value.isfinite()).nonzero()
        place = at[0].tolist()
        raise CheckpointError(
            f"{file}: {name} holds {float(value[tuple(place)])} at {place}, {len(at)} such of {value.numel()}; expected"
            " numbers; fetch the checkpoint again, or train it anew"
        )
    return value


def is_finite(value: Tensor) -> bool:
    """Whether a tensor holds neither NaN nor an infinity; whole numbers never do."""
    if not value.is_floating_point() or not value.numel():
        return True
    low, high = value.aminmax()  # NaN wins in both
    return math.isfinite(low) and math.isfinite(high)


def check_kinds(stored: Mapping[str, Entry]) -> str:
    """The one element type of all tensors, as safetensors spells it; CheckpointError names the differing one."""
    first, kind = next((name, entry.kind) for name, entry in stored.items())
    for name, entry in stored.items():
        if entry.kind not in DTYPES:
            raise CheckpointError(
                f"{entry.file}: {name} has dtype {entry.kind}; expected one of {', '.join(DTYPES)};"
                " quantised checkpoints of this kind are not supported, use the original one"
            )
        if entry.kind != kind:
            raise CheckpointError(
                f"{entry.file}: {name} has dtype {entry.kind}; expected {kind} like {first};"
                " save all tensors in one dtype"
            )
    return kind


def sha256_of(files: Iterable[Path]) -> str:
    """SHA-256, in hex, over the files' names, sizes and bytes, read in pieces of 1 MiB."""
    total = hashlib.sha256()
    for path in files:
        total.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as stream:
            while piece := stream.read(1 << 20):
                total.update(piece)
    return total.hexdigest()
