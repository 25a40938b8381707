"""A teacher in four bits with the whole numbers of llama.cpp's Q4_0, as compressed-tensors packs them.

So a program that reads GGUF and one that reads a checkpoint multiply with the same weights: blocks of 32 inputs, of
which the largest number becomes -8 times the scale. Embedding and output matrix stay as they are.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from draftwood.compiler.bundle.staging import staged
from draftwood.compiler.teachers.checkpoint import Checkpoint
from draftwood.compiler.teachers.folder import tokenizer_files
from draftwood.compiler.teachers.quantised import linear_layers

# O outputs, H inputs, G blocks of inputs

_BLOCK, _MIDDLE, _WORD = 32, 8, 8
_WEIGHTS = {
    "num_bits": 4,
    "type": "int",
    "symmetric": True,
    "strategy": "group",
    "group_size": _BLOCK,
    "dynamic": False,
}
_SAID = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": _WEIGHTS, "input_activations": None}},
}


def in_four_bits(model: Path, work: Path) -> Path:
    """The folder's twin in ``work``, written whole unless it is there."""
    out = work / f"{model.name}-w4"
    if out.exists():
        return out
    teacher = Checkpoint.open(model)
    layers = [layer for layer in linear_layers(teacher.parts) if layer != "lm_head"]
    packed = {name for layer in layers for name, _ in teacher.parts[f"{layer}.weight"].tensors}
    with staged(out) as folder:
        tensors: dict[str, Tensor] = {}
        for name in teacher.entries:
            value, module = teacher.tensor(name), name.removesuffix(".weight")
            if name not in packed:
                tensors[name] = value
                continue
            whole_OH, scale_OG = q4_0(value.float())
            tensors[f"{module}.weight_packed"] = _words(whole_OH)
            tensors[f"{module}.weight_scale"] = scale_OG
            tensors[f"{module}.weight_shape"] = torch.tensor(value.shape)
        save_file(tensors, folder / "model.safetensors")
        config = json.loads((model / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"quantization_config": _SAID}))
        for path in tokenizer_files(model):
            shutil.copyfile(path, folder / path.name)
    return out


def q4_0(weight_OH: Tensor) -> tuple[Tensor, Tensor]:
    """Whole numbers 0 to 15 [O, H] and scales float16 [O, G], as gguf.quants has them (ggml's quantize_row_q4_0)."""
    blocks_OGX = weight_OH.unflatten(1, (-1, _BLOCK))
    largest_OG1 = blocks_OGX.gather(2, blocks_OGX.abs().argmax(2, keepdim=True))
    scale_OG1 = largest_OG1 / -_MIDDLE
    inverse_OG1 = torch.where(scale_OG1 == 0, 0.0, 1 / scale_OG1)
    whole_OGX = (blocks_OGX * inverse_OG1 + (_MIDDLE + 0.5)).trunc().clamp(0, 15)
    return whole_OGX.to(torch.uint8).flatten(1), scale_OG1[..., 0].half()


def _words(whole_OH: Tensor) -> Tensor:
    """int32 [O, H / 8], the first in the lowest bits."""
    shifted = whole_OH.long().unflatten(1, (-1, _WORD)) << (4 * torch.arange(_WORD))
    words = shifted.sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()
