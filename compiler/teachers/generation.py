"""generation_config.json: how the model's authors sample from it, for servers to take if a request says nothing."""

from __future__ import annotations

from pathlib import Path

import msgspec

from draftwood.compiler.checkpoints.fields import Fields, read_json
from draftwood.manifest import UsualSampling

FILE = "generation_config.json"


def usual_sampling(model: Path) -> UsualSampling:
    """The sampling of a folder's generation_config.json; nothing if there is no such file.

    As in vLLM, ``do_sample`` is not looked at, and the file's other fields are left to the request.

    Raises:
        CheckpointError: a value is outside its range.
    """
    if not (path := model / FILE).is_file():
        return UsualSampling()
    fields = Fields(path, read_json(path))
    values = {name: fields.get(name) for name in UsualSampling.__struct_fields__}
    if values["top_k"] == -1:  # another way to say that all are kept
        values["top_k"] = 0
    for name, value in values.items():
        try:
            msgspec.convert({name: value}, UsualSampling)
        except msgspec.ValidationError as error:
            fields.fail(name, str(error).removeprefix("Expected ").partition(" - at")[0])
    return msgspec.convert(values, UsualSampling)
