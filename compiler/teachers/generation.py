"""How the model's authors sample from it, for servers to take if a request says nothing.

A folder has it in generation_config.json, or in config.json if there is no such file; a GGUF file in its metadata.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from draftwood.compiler.checkpoints.fields import Fields, read_json
from draftwood.compiler.checkpoints.gguf_header import Header
from draftwood.manifest import UsualSampling

FILE = "generation_config.json"
# The keys of a GGUF file, by the names of generation_config.json.
_KEYS = {
    "temperature": "general.sampling.temp",
    "top_p": "general.sampling.top_p",
    "top_k": "general.sampling.top_k",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}


def sampling_of_folder(folder: Path) -> UsualSampling:
    """The sampling of generation_config.json, or of config.json where older models have it; nothing without a file.

    As in transformers and vLLM, the second counts only if the first is missing. As in vLLM, ``do_sample`` is not looked
    at, and the file's other fields are left to the request.

    Raises:
        CheckpointError: a value is outside its range.
    """
    path = next((folder / name for name in (FILE, "config.json") if (folder / name).is_file()), None)
    return _sampling(Fields(path, read_json(path)), {}) if path else UsualSampling()


def sampling_of_gguf(header: Header) -> UsualSampling:
    """The sampling of a GGUF file, whose numbers are float32: 0.95 is read as 0.95; CheckpointError as above."""
    rounded = {key: float(f"{value:.7g}") for key, value in header.fields.items() if isinstance(value, float)}
    return _sampling(Fields(header.path, {**header.fields, **rounded}), _KEYS)


def _sampling(fields: Fields, keys: dict[str, str]) -> UsualSampling:
    """The values, each under its key or its own name."""
    values: dict[str, float] = {}
    for name in UsualSampling.__struct_fields__:
        key = keys.get(name, name)
        if fields.get(key) is None:
            continue
        # Of top_k -1 is another way to say that all are kept.
        values[name] = max(fields.whole(key), 0) if name == "top_k" else fields.number(key)
        try:
            msgspec.convert({name: values[name]}, UsualSampling)
        except msgspec.ValidationError as error:
            fields.fail(key, str(error).removeprefix("Expected ").partition(" - at")[0])
    return msgspec.convert(values, UsualSampling)
