"""A teacher checkpoint on disk: what a Hugging Face folder must hold, and its tensors one at a time.

Only safetensors are read. Opening looks at headers alone, so a checkpoint larger than memory can be checked.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from draftwood.compiler.checkpoints.fields import read_json
from draftwood.compiler.teachers.config import DType, TeacherConfig, read_config
from draftwood.errors import CheckpointError
from draftwood.files import open_regular

# As safetensors spells them.
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}

_CONVERT = "load it once with transformers and save_pretrained(..., safe_serialization=True)"
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a stored tensor lies, with its shape and its element type as safetensors spells it ("BF16")."""

    file: Path
    shape: tuple[int, ...]
    kind: str


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A teacher folder that has passed the checks of ``open``; tensors are read when asked for.

    ``config.dtype`` is the type of the stored weights, whatever config.json declares.
    """

    folder: Path
    config: TeacherConfig
    entries: Mapping[str, Entry]

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Reads config.json and the header of every shard, and checks names, shapes and dtypes.

        Raises:
            CheckpointError: the configuration is unsupported, a file is missing or damaged, or a tensor is
                missing, unexpected, of another shape, or of another dtype than the rest.
        """
        config = read_config(folder)
        stored = {name: entry for name, entry in _entries(folder).items() if not name.endswith(".inv_freq")}
        if config.tied:  # some exporters store the alias as well; the embedding is the one that counts
            stored.pop("lm_head.weight", None)
        _check_names(folder, expected_tensors(config), stored)
        kind = check_kinds(stored)
        dtype = cast(DType, str(DTYPES[kind]).removeprefix("torch."))
        return cls(folder, replace(config, dtype=dtype), stored)

    @classmethod
    def describe(cls, folder: Path) -> Checkpoint:
        """The teacher that config.json describes, its weights unread and maybe absent; has no tensors."""
        return cls(folder, read_config(folder), {})

    @property
    def dtype(self) -> torch.dtype:
        """Element type of every tensor."""
        return cast(torch.dtype, getattr(torch, self.config.dtype))

    def names(self) -> list[str]:
        """Our weight names, in the order of the forward pass."""
        return list(teacher_parts(self.config))

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor under its Hugging Face name."""
        return self.entries[name].shape

    def tensor(self, name: str) -> Tensor:
        """A tensor as it is stored, under its Hugging Face name."""
        return read_tensor(self.entries[name].file, name)

    def weight(self, name: str) -> Tensor:
        """A weight under our name, its parts concatenated along dimension 0; linear weights are [out, in]."""
        parts = [self.tensor(part) for part in teacher_parts(self.config)[name]]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def digest(self) -> str:
        """SHA-256, in hex, over config.json and every shard."""
        shards = sorted({entry.file for entry in self.entries.values()})
        return sha256_of([self.folder / "config.json", *shards])


def expected_tensors(config: TeacherConfig) -> dict[str, tuple[int, ...]]:
    """Hugging Face name and shape of every tensor of a teacher; the same names serve both families."""
    # H hidden, I intermediate, Q width of all query heads, K width of all key/value heads, V vocabulary
    H, I, V = config.hidden, config.intermediate, config.vocabulary  # noqa: E741
    Q, K = config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (V, H)}
    for i in range(config.layers):
        at = f"model.layers.{i}"
        shapes[f"{at}.input_layernorm.weight"] = (H,)
        for name, rows, columns in (("q", Q, H), ("k", K, H), ("v", K, H), ("o", H, Q)):
            shapes[f"{at}.self_attn.{name}_proj.weight"] = (rows, columns)
            if config.o_bias if name == "o" else config.qkv_bias:
                shapes[f"{at}.self_attn.{name}_proj.bias"] = (rows,)
        shapes[f"{at}.post_attention_layernorm.weight"] = (H,)
        shapes |= {f"{at}.mlp.{name}_proj.weight": (I, H) for name in ("gate", "up")}
        shapes[f"{at}.mlp.down_proj.weight"] = (H, I)
    shapes["model.norm.weight"] = (H,)
    return shapes if config.tied else shapes | {"lm_head.weight": (V, H)}


def teacher_parts(config: TeacherConfig) -> dict[str, tuple[str, ...]]:
    """Our weight name -> the Hugging Face tensors that, concatenated along dimension 0, make it."""
    parts: dict[str, tuple[str, ...]] = {"embed.weight": ("model.embed_tokens.weight",)}
    for i in range(config.layers):
        ours, theirs = f"layers.{i}", f"model.layers.{i}"
        projections = {kind: tuple(f"{theirs}.self_attn.{p}_proj.{kind}" for p in "qkv") for kind in ("weight", "bias")}
        parts[f"{ours}.attn_norm.weight"] = (f"{theirs}.input_layernorm.weight",)
        parts[f"{ours}.qkv.weight"] = projections["weight"]
        if config.qkv_bias:
            parts[f"{ours}.qkv.bias"] = projections["bias"]
        parts[f"{ours}.o.weight"] = (f"{theirs}.self_attn.o_proj.weight",)
        if config.o_bias:
            parts[f"{ours}.o.bias"] = (f"{theirs}.self_attn.o_proj.bias",)
        parts[f"{ours}.mlp_norm.weight"] = (f"{theirs}.post_attention_layernorm.weight",)
        parts[f"{ours}.gate_up.weight"] = tuple(f"{theirs}.mlp.{p}_proj.weight" for p in ("gate", "up"))
        parts[f"{ours}.down.weight"] = (f"{theirs}.mlp.down_proj.weight",)
    parts["norm.weight"] = ("model.norm.weight",)
    return parts if config.tied else parts | {"lm_head.weight": ("lm_head.weight",)}


def tokenizer_files(folder: Path) -> list[Path]:
    """The tokenizer's files, those that exist; none is an acceptable answer."""
    return [folder / name for name in _TOKENIZER if (folder / name).is_file()]


def read_header(file: Path) -> dict[str, Entry]:
    """What a safetensors file holds, from its header alone; CheckpointError if missing or damaged."""
    try:
        open_regular(file).close()  # the library would wait for a FIFO
        with safe_open(file, framework="pt") as opened:
            names = opened.keys()
            slices = {name: opened.get_slice(name) for name in names}
            return {n: Entry(file, tuple(s.get_shape()), s.get_dtype()) for n, s in slices.items()}
    except FileNotFoundError:
        raise CheckpointError(f"{file}: no such file; fetch the whole checkpoint") from None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: not a whole safetensors file ({error}); fetch it again") from None


def byte_offset(file: Path, name: str) -> int:
    """Where a tensor's bytes begin in a safetensors file that has passed ``read_header``."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        begin: int = json.loads(stream.read(length))[name]["data_offsets"][0]
    return 8 + length + begin


def read_tensor(file: Path, name: str) -> Tensor:
    """One tensor of a safetensors file, as stored; CheckpointError if the file changed after the check."""
    try:
        with safe_open(file, framework="pt") as opened:
            return cast(Tensor, opened.get_tensor(name))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: {name} cannot be read any more ({error}); open it again") from None


def check_kinds(stored: Mapping[str, Entry]) -> str:
    """The one element type of all tensors, as safetensors spells it; CheckpointError names what differs."""
    first, kind = next((name, entry.kind) for name, entry in stored.items())
    for name, entry in stored.items():
        if entry.kind not in DTYPES:
            raise CheckpointError(
                f"{entry.file}: {name} has dtype {entry.kind}; expected one of {', '.join(DTYPES)};"
                " quantized checkpoints are not supported, use the original one"
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


def _entries(folder: Path) -> dict[str, Entry]:
    """All tensors of the folder; a single file goes before an index, as in transformers."""
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():
        return read_header(folder / "model.safetensors")
    if index.is_file():
        return _sharded(folder, index)
    if any(folder.glob("pytorch_model*.bin*")):
        raise CheckpointError(f"{folder}: has pytorch_model.bin only, a pickle; expected safetensors; {_CONVERT}")
    raise CheckpointError(f"{folder}: no weights; expected model.safetensors or {index.name} with its shards")


def _sharded(folder: Path, index: Path) -> dict[str, Entry]:
    placed = read_json(index).get("weight_map")
    if not isinstance(placed, dict) or not all(isinstance(file, str) for file in placed.values()):
        raise CheckpointError(f"{index}: weight_map is missing or not names to files; fetch it again")
    if outside := [file for file in placed.values() if Path(file).name != file]:
        raise CheckpointError(f"{index}: weight_map names {outside[0]!r}; expected files of the same folder")
    headers = {file: read_header(folder / file) for file in sorted(set(placed.values()))}
    for name, file in placed.items():
        if name not in headers[file]:
            raise CheckpointError(f"{folder / file}: no tensor {name}; expected by {index.name}; fetch both again")
    found = {name: entry for header in headers.values() for name, entry in header.items()}
    return found | {name: headers[file][name] for name, file in placed.items()}


def _check_names(folder: Path, expected: Mapping[str, tuple[int, ...]], stored: Mapping[str, Entry]) -> None:
    missing = [name for name in expected if name not in stored]
    extra = sorted(name for name in stored if name not in expected)
    if missing:
        raise CheckpointError(
            f"{folder}: {len(missing)} tensors missing, first {missing[0]}; expected it with shape"
            f" {list(expected[missing[0]])} from config.json; found {', '.join(extra[:3]) or 'nothing'}"
            " instead; fetch the whole checkpoint"
        )
    if extra:
        raise CheckpointError(
            f"{folder}: {len(extra)} tensors that config.json does not explain: {', '.join(extra[:3])};"
            " expected a plain decoder; biases, adapters and extra heads must be merged or removed"
        )
    for name, shape in expected.items():
        if stored[name].shape != shape:
            raise CheckpointError(
                f"{stored[name].file}: {name} has shape {list(stored[name].shape)}; expected {list(shape)}"
                " from config.json; one of the two belongs to another checkpoint"
            )
