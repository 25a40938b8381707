"""A quantised teacher as others read it: compressed-tensors for vLLM, msModelSlim for vllm-ascend.

Tensors are read, rounded and written one at a time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from draftwood.compiler.checkpoints.int8 import rounded
from draftwood.compiler.checkpoints.packing import CONFIG, OLD_CONFIG
from draftwood.compiler.checkpoints.scheme import (
    ACTIVATIONS,
    DESCRIPTION,
    TARGET,
    UNQUANTISED,
    W8A8_DYNAMIC,
    WEIGHTS,
)
from draftwood.compiler.checkpoints.weight import WeightEntry
from draftwood.compiler.onnx.weights import write_weights
from draftwood.compiler.quantisation.calibration import NORMS
from draftwood.compiler.teachers.checkpoint import Checkpoint
from draftwood.compiler.teachers.quantised import OFFSET, SCALE

Layout = Literal["compressed-tensors", "msmodelslim"]
FILES: Mapping[Layout, str] = {
    "compressed-tensors": "model.safetensors", "msmodelslim": "quant_model_weights.safetensors"
}  # fmt: skip
_HEAD = "lm_head.weight"
_EXPERTS = ".experts."


def write(
    folder: Path,
    checkpoint: Checkpoint,
    layers: tuple[str, ...],
    factors: Mapping[str, Tensor],
    layout: Layout,
    progress: Callable[[str], None],
) -> None:
    """Fills ``folder`` with the quantised checkpoint; ``layers`` have our names, ``factors`` migrate some of them."""
    checkpoint.reader.copy_texts(folder)
    entries = list(_entries(checkpoint, layers, factors, layout == "msmodelslim", progress))
    write_weights(folder / FILES[layout], entries, checkpoint.dtype)
    names = [entry.name for entry in entries]
    config = checkpoint.reader.description()
    if checkpoint.config.tied and _HEAD in names:
        config["tie_word_embeddings"] = False
    for name in (CONFIG, OLD_CONFIG):
        config.pop(name, None)  # of what was packed
    if layout == "compressed-tensors":
        config[CONFIG] = _described(_alone(entries))
    else:
        _write_json(folder / DESCRIPTION, _kinds(names))
        placed = dict.fromkeys(names, FILES[layout])
        _write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": placed})
    _write_json(folder / "config.json", config)


def _entries(
    checkpoint: Checkpoint,
    layers: tuple[str, ...],
    factors: Mapping[str, Tensor],
    offsets: bool,
    progress: Callable[[str], None],
) -> Iterator[WeightEntry]:
    """Every published tensor in the order of the forward pass; scales and offsets follow a quantised one."""
    shrunk = {f"{name.rpartition('.')[0]}.{NORMS[name.rpartition('.')[2]]}": by for name, by in factors.items()}
    for name, part in checkpoint.parts.items():
        layer = name.removesuffix(".weight")
        for published, shape in part.tensors:
            if layer in layers and name.endswith(".weight"):
                progress(published)
                read = partial(checkpoint.tensor, published)
                yield from _int8_entries(published, shape, read, factors.get(layer), offsets)
            elif layer in shrunk:
                read = partial(_shrunk, checkpoint, published, shrunk[layer])
                yield WeightEntry(published, shape, read, dtype=checkpoint.dtype)
            else:
                yield WeightEntry(published, shape, partial(checkpoint.tensor, published), dtype=checkpoint.dtype)
    if checkpoint.config.tied and "lm_head" in layers:
        ((published, shape),) = checkpoint.parts["embed.weight"].tensors
        yield from _int8_entries(_HEAD, shape, partial(checkpoint.tensor, published), None, offsets)


def _int8_entries(
    name: str,
    shape: tuple[int, ...],
    source: Callable[[], Tensor],
    factor: Tensor | None = None,
    offsets: bool = False,
) -> Iterator[WeightEntry]:
    """A matrix [O, H] in int8 and its scales [O, 1]; with ``offsets``, zeros as well."""
    unread: list[tuple[Tensor, Tensor]] = []

    def read(which: int) -> Tensor:
        # The scale is always read right after the weight.
        if not unread:
            unread.append(rounded(source(), 1.0 if factor is None else factor))
        value = unread[0][which]
        if which == 1:
            unread.clear()
        return value

    column = (shape[0], 1)
    yield WeightEntry(name, shape, partial(read, 0), dtype=torch.int8)
    yield WeightEntry(f"{name.removesuffix('weight')}{SCALE}", column, partial(read, 1), dtype=torch.float32)
    if offsets:
        zeros = partial(torch.zeros, column)
        yield WeightEntry(f"{name.removesuffix('weight')}{OFFSET}", column, zeros, dtype=torch.float32)


def _shrunk(checkpoint: Checkpoint, name: str, factor: Tensor) -> Tensor:
    return (checkpoint.tensor(name).float() / factor).to(checkpoint.dtype)


def _alone(entries: list[WeightEntry]) -> list[str]:
    """Published modules whose matrices stay as they are; all experts by one pattern."""
    plain = [entry for entry in entries if len(entry.shape) == 2 and entry.dtype is not torch.int8]
    names = [entry.name.removesuffix(".weight") for entry in plain if entry.name.endswith(".weight")]
    names = [name for name in names if "embed_tokens" not in name]
    one_by_one = [name for name in names if _EXPERTS not in name]
    tied = [] if any(entry.name == _HEAD for entry in entries) else ["lm_head"]
    experts = any(_EXPERTS in entry.name for entry in entries)  # maybe all of a layer in one tensor
    return one_by_one + tied + ([rf"re:.*{re.escape(_EXPERTS)}.*"] if experts else [])


def _described(alone: list[str]) -> dict[str, Any]:
    """``quantization_config``: every linear layer, but those that were left ``alone``."""
    group = {"targets": [TARGET], "weights": dict(WEIGHTS), "input_activations": dict(ACTIVATIONS)}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {**group, "output_activations": None}},
        "ignore": alone,
        "kv_cache_scheme": None,
    }


def _kinds(names: list[str]) -> dict[str, str]:
    """``quant_model_description.json``: the type of every tensor."""
    whole = {name.rpartition(".")[0] for name in names if name.endswith(SCALE)}
    kinds = {name: W8A8_DYNAMIC if name.rpartition(".")[0] in whole else UNQUANTISED for name in names}
    return {"model_quant_type": W8A8_DYNAMIC, "version": "1.0.0", **kinds}


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
