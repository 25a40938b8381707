"""The tensors of a Hugging Face folder, in one file or in shards, checked against the expected ones."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from draftwood.compiler.checkpoints.fields import read_json
from draftwood.compiler.checkpoints.safetensors_file import Entry, read_header
from draftwood.errors import CheckpointError

# msModelSlim's names, of its releases before and since 1.0: quant_model_weight_w8a8_dynamic and quant_model_weights.
_MSMODELSLIM = "quant_model_weight*.safetensors"
_CONVERT = "load it once with transformers and save_pretrained(..., safe_serialization=True)"


class Advice(NamedTuple):
    """The end of messages about tensors that do not fit: the other possibilities, and the way out."""

    missing: str
    extra: str
    shape: str


WHOLE_TEACHER = Advice(
    missing="; fetch the whole checkpoint",
    extra="a plain decoder; biases, adapters and extra heads must be merged or removed",
    shape="; one of the two belongs to another checkpoint",
)


def folder_entries(folder: Path) -> dict[str, Entry]:
    """All tensors of a Hugging Face folder; a single file goes before an index, as in transformers. Names of
    msModelSlim come last.

    Raises:
        CheckpointError: there are none, a file is missing or damaged, or the index names what is not there.
    """
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():
        return read_header(folder / "model.safetensors")
    if index.is_file():
        return _sharded(folder, index)
    if own := sorted(folder.glob(f"{_MSMODELSLIM}.index.json")) or sorted(folder.glob(_MSMODELSLIM)):
        if len(own) > 1:
            raise CheckpointError(
                f"{folder}: has {own[0].name} and {own[1].name}; expected one file of msModelSlim's, or one index"
            )
        return _sharded(folder, own[0]) if own[0].suffix == ".json" else read_header(own[0])
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
    entries = {name: entry for header in headers.values() for name, entry in header.items()}
    return entries | {name: headers[file][name] for name, file in placed.items()}


def check_names(
    where: Path, expected: Mapping[str, tuple[int, ...]], stored: Mapping[str, Entry], advice: Advice = WHOLE_TEACHER
) -> None:
    """CheckpointError if a tensor is missing, unexpected or of another shape."""
    missing = [name for name in expected if name not in stored]
    extra = sorted(name for name in stored if name not in expected)
    if missing:
        raise CheckpointError(
            f"{where}: {len(missing)} tensors missing, first {missing[0]}; expected it with shape"
            f" {list(expected[missing[0]])} from config.json; found {', '.join(extra[:3]) or 'nothing'}"
            f" instead{advice.missing}"
        )
    if extra:
        raise CheckpointError(
            f"{where}: {len(extra)} tensors that config.json does not explain: {', '.join(extra[:3])};"
            f" expected {advice.extra}"
        )
    for name, shape in expected.items():
        if stored[name].shape != shape:
            raise CheckpointError(
                f"{stored[name].file}: {name} has shape {list(stored[name].shape)}; expected {list(shape)}"
                f" from config.json{advice.shape}"
            )
