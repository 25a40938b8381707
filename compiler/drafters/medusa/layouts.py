"""The layouts in which Medusa heads are published, each turned into that of FasterDecoding/Medusa.

===============  ==================================================  ===================================================
layout           what the folder holds                               keys
===============  ==================================================  ===================================================
Medusa-1         medusa_lm_head.safetensors or .pt                   {i}.{j}.linear.weight and .bias, {i}.{n}.weight
Medusa-1.0       the whole teacher, with the heads among its         the same after medusa_head.
                 tensors
vLLM             config.json of MedusaModel, model.safetensors       blocks.{i}.layers.{j}.weight and maybe .bias,
                                                                     lm_heads.{i}.weight or lm_head.weight, token_map
===============  ==================================================  ===================================================

Head i has blocks 0 to n - 1 and, unless it is the teacher's, an output matrix. ``token_map`` lists the teacher's ids of
a smaller vocabulary; output matrices may still be stored whole.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from draftwood.compiler.checkpoints.fields import Fields, read_json
from draftwood.compiler.checkpoints.safetensors_file import Entry
from draftwood.compiler.checkpoints.tensors import DrafterTensors, Reader, open_stored, open_tensors
from draftwood.compiler.teachers.checkpoint import Checkpoint
from draftwood.errors import CheckpointError

MEDUSA_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
TOKEN_MAP = "token_map"
_PREFIX = "medusa_head."
_VLLM = re.compile(r"(?:medusa_heads\.)?(?:blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)|lm_heads\.(\d+)\.weight)")
_SHARED = ("lm_head.weight", "medusa_heads.lm_head.weight")


class Heads(NamedTuple):
    """The tensors of some heads: ``plain`` are their keys as FasterDecoding writes them, and the file's own."""

    where: Path
    files: tuple[Path, ...]
    entries: Mapping[str, Entry]
    plain: Mapping[str, str]
    read: Reader
    token_map: str | None = None
    # Whether the heads stand among the tensors of a whole teacher.
    whole: bool = False


def heads_file(folder: Path) -> Path | None:
    """The file of heads alone in a folder, if there is one."""
    return next((folder / name for name in MEDUSA_FILES if (folder / name).is_file()), None)


def open_heads(path: Path) -> Heads:
    """The heads of a folder or file in any of the layouts; CheckpointError if there are none."""
    file = heads_file(path)
    if path.is_file() and path.suffix in (".safetensors", ".pt") and path.name != "model.safetensors":
        file = path
    if file:
        entries, read = open_tensors(file)
        return Heads(file, (file,), entries, _plain(file, entries), read)
    folder = path if path.is_dir() else path.parent
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{path}: no Medusa heads; expected {' or '.join(MEDUSA_FILES)}, or a folder with one")
    fields = Fields(folder / "config.json", read_json(folder / "config.json"))
    stored = open_stored(path, "Medusa")
    return _vllm(fields, stored) if is_vllm(fields.values) else _whole(fields, stored)


def is_vllm(fields: Mapping[str, object]) -> bool:
    """Whether a config.json is one of vLLM's MedusaModel."""
    return fields.get("model_type") == "medusa" or fields.get("architectures") == ["MedusaModel"]


def check_base(path: Path, teacher: Checkpoint) -> None:
    """Raises CheckpointError if the heads' folder holds another model than the teacher: they were trained on that."""
    stored, name = open_stored(path, "Medusa"), "model.norm.weight"
    if name in stored.entries and name in teacher.entries:
        ours, theirs = stored.read(name), teacher.tensor(name)
        if ours.shape != theirs.shape or not torch.equal(ours.float(), theirs.float()):
            raise CheckpointError(
                f"{stored.where}: {name} is not that of {teacher.path}; expected the model in the heads' folder as the"
                " teacher; give this folder as MODEL too"
            )


def _plain(where: Path, keys: Collection[str]) -> dict[str, str]:
    plain = {key.removeprefix(_PREFIX): key for key in keys}
    if len(plain) != len(keys):
        raise CheckpointError(f"{where}: has keys with and without {_PREFIX!r} for one tensor; expected one of the two")
    return plain


def _whole(fields: Fields, stored: DrafterTensors) -> Heads:
    entries = {key: entry for key, entry in stored.entries.items() if key.startswith(_PREFIX)}
    if not entries:
        raise CheckpointError(
            f"{stored.where}: holds no tensors {_PREFIX}*, which medusa_num_heads promises; expected them, or a file"
            f" {' or '.join(MEDUSA_FILES)} next to config.json"
        )
    files = tuple(sorted({entry.file for entry in entries.values()}))
    return Heads(stored.where, files, entries, _plain(stored.where, entries), stored.read, whole=True)


def _vllm(fields: Fields, stored: DrafterTensors) -> Heads:
    plain_keys, maps, shared = {}, [], []
    matches = {key: _VLLM.fullmatch(key) for key in stored.entries}
    blocks = 1 + max((int(m[2]) for m in matches.values() if m and m[2]), default=-1)
    for key, match in matches.items():
        if match is not None:
            plain = f"{match[1]}.{match[2]}.linear.{match[3]}" if match[1] else f"{match[4]}.{blocks}.weight"
            plain_keys[plain] = key
        elif key.removeprefix("medusa_heads.") == TOKEN_MAP:
            maps.append(key)
        elif key in _SHARED:
            shared.append(key)
        else:
            plain_keys[key] = key  # refused by its name
    if fields.flag("original_lm_head", False) != bool(shared):
        fields.fail(
            "original_lm_head", f"{str(bool(shared)).lower()}, since the file has {'' if shared else 'no '}lm_head"
        )
    if fields.number("logit_scale", 1) != 1:
        fields.fail("logit_scale", "1 or no such field; heads have no other form of it")
    own = [key for key, match in matches.items() if match and match[4]]
    if shared and len(several := [*shared, *own]) > 1:
        raise CheckpointError(
            f"{stored.where}: holds {several[0]} for all heads and {several[1]}; expected one of the two"
        )
    for head in {plain.split(".")[0] for plain in plain_keys} if shared else ():
        plain_keys[f"{head}.{blocks}.weight"] = shared[0]
    reduced = fields.get("truncated_vocab_size") not in (None, fields.get("vocab_size"))
    if reduced and not maps:
        fields.fail("truncated_vocab_size", "null, or a token_map in the file, which says whose ids these are")
    entries = {key: entry for key, entry in stored.entries.items() if key not in maps}
    return Heads(
        stored.where, stored.files, stored.entries if maps else entries, plain_keys, stored.read, (*maps, None)[0]
    )
