"""A teacher's folder as publishers of four-bit checkpoints write it, packed number by number."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftwood.compiler.teachers.checkpoint import Checkpoint

# O outputs, H inputs, G groups

# Of which output of its word every number of AWQ is, from the lowest bits on.
_AWQ = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True, slots=True)
class Numbers:
    """A matrix as whole numbers [O, H], zeros [O, G] and scales [O, G] in their stored type."""

    whole: Tensor
    zero: Tensor
    scale: Tensor

    @property
    def exact(self) -> Tensor:
        """(whole - zero) * scale in fp64, [O, H]."""
        many = self.whole.shape[1] // self.scale.shape[1]
        zero, scale = (t.double().repeat_interleave(many, 1) for t in (self.zero, self.scale))
        return (self.whole.double() - zero) * scale


def numbers_of(weight: Tensor, bits: int, group: int, symmetric: bool, dtype: torch.dtype) -> Numbers:
    """The nearest numbers of a matrix; ``group`` inputs share a scale, all of a row if it is -1."""
    rows = weight.double().unflatten(1, (1 if group == -1 else -1, weight.shape[1] if group == -1 else group))
    most = (1 << bits) - 1
    if symmetric:
        scale = (rows.abs().amax(2) / (most // 2)).clamp_min(1e-4).to(dtype)
        zero = torch.full(scale.shape, 1 << (bits - 1))
    else:
        low, high = rows.amin(2).clamp(max=0), rows.amax(2).clamp(min=0)
        scale = ((high - low) / most).clamp_min(1e-4).to(dtype)
        # None is the most: GPTQ v1 stores less one, and cannot store that.
        zero = (-low / scale.double()).round().clamp(1, most - 1).long()
    whole = ((rows / scale.double()[..., None]).round() + zero[..., None]).clamp(0, most).long().flatten(1)
    return Numbers(whole, zero, scale)


def _packed(values: NDArray[np.int64], bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Rows of int32 words; ``order`` says which of its values every place of a word holds."""
    many = 32 // bits
    values = np.pad(values, ((0, 0), (0, -values.shape[1] % many)))
    words = np.zeros((values.shape[0], values.shape[1] // many), np.uint32)
    for place, number in enumerate(order or range(many)):
        words |= values[:, number::many].astype(np.uint32) << np.uint32(place * bits)
    return torch.from_numpy(words.view(np.int32))


def _awq(found: Numbers, bits: int) -> dict[str, Tensor]:
    whole, zero = (_packed(values.t().numpy(), bits, _AWQ) for values in (found.whole, found.zero))
    return {"qweight": whole, "qzeros": zero, "scales": found.scale.t().contiguous()}


def _gptq(found: Numbers, bits: int, less: int = 1) -> dict[str, Tensor]:
    inputs, groups = found.whole.shape[1], found.scale.shape[1]
    return {
        "qweight": _packed(found.whole.numpy(), bits).t().contiguous(),
        "qzeros": _packed(found.zero.t().numpy() - less, bits),
        "scales": found.scale.t().contiguous(),
        "g_idx": (torch.arange(inputs) // (inputs // groups)).int(),
    }


def _compressed(found: Numbers, bits: int) -> dict[str, Tensor]:
    tensors = {
        "weight_packed": _packed(found.whole.numpy(), bits),
        "weight_scale": found.scale,
        "weight_shape": torch.tensor(found.whole.shape),
    }
    if bool((found.zero == 1 << (bits - 1)).all()):
        return tensors
    return tensors | {"weight_zero_point": _packed(found.zero.t().numpy(), bits).t().contiguous()}


def _said_by_gptq(form: str) -> Callable[[int, int, bool], dict[str, Any]]:
    def said(bits: int, group: int, symmetric: bool) -> dict[str, Any]:
        named = {"bits": bits, "group_size": group, "desc_act": False, "sym": symmetric}
        return {"quant_method": "gptq", "checkpoint_format": form, **named}

    return said


def _said_by_awq(bits: int, group: int, symmetric: bool) -> dict[str, Any]:
    named = {"bits": bits, "group_size": group, "zero_point": True, "version": "gemm"}
    return {"quant_method": "awq", "modules_to_not_convert": None, **named}


def _said_by_auto_round(form: str) -> Callable[[int, int, bool], dict[str, Any]]:
    def said(bits: int, group: int, symmetric: bool) -> dict[str, Any]:
        named = {"bits": bits, "group_size": group, "sym": symmetric, "data_type": "int"}
        return {"quant_method": "auto-round", "packing_format": form, **named}

    return said


def _said_by_compressed(bits: int, group: int, symmetric: bool) -> dict[str, Any]:
    grouped = {"strategy": "channel", "group_size": None} if group == -1 else {"strategy": "group", "group_size": group}
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "dynamic": False, "actorder": None, **grouped}
    found = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    named = {"format": "pack-quantized", "quantization_status": "compressed", "ignore": ["lm_head"]}
    return {"quant_method": "compressed-tensors", **named, "config_groups": {"group_0": found}}


# By name: the function that packs a matrix's numbers, and its description.
LAYOUTS: Mapping[
    str, tuple[Callable[[Numbers, int], dict[str, Tensor]], Callable[[int, int, bool], dict[str, Any]]]
] = {
    "awq": (_awq, _said_by_awq),
    "gptq": (_gptq, _said_by_gptq("gptq")),
    "gptq_v2": (lambda found, bits: _gptq(found, bits, 0), _said_by_gptq("gptq_v2")),
    "auto_round": (lambda found, bits: _gptq(found, bits, 0), _said_by_auto_round("auto_round")),
    "auto_round:auto_gptq": (_gptq, _said_by_auto_round("auto_round:auto_gptq")),
    "auto_round:auto_awq": (_awq, _said_by_auto_round("auto_round:auto_awq")),
    "compressed-tensors": (_compressed, _said_by_compressed),
}


def save_packed(
    teacher: Path,
    folder: Path,
    layout: str,
    *,
    bits: int = 4,
    group: int = 32,
    symmetric: bool = False,
    dtype: torch.dtype = torch.float16,
) -> dict[str, Numbers]:
    """Writes the teacher's folder with the matrices of its blocks packed, and returns their numbers by module."""
    shutil.copytree(teacher, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    pack, said = LAYOUTS[layout]
    config = json.loads((teacher / "config.json").read_text())
    config |= dict.fromkeys({"torch_dtype", "dtype"} & {"torch_dtype", *config}, str(dtype).removeprefix("torch."))
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": said(bits, group, symmetric)}))
    tensors, found = {}, dict[str, Numbers]()
    for name, value in load_file(teacher / "model.safetensors").items():
        module = name.removesuffix(".weight")
        router = module.endswith(".gate")
        if value.dim() != 2 or "embed" in name or module == "lm_head" or router:
            tensors[name] = value.to(dtype)
            continue
        found[module] = numbers_of(value, bits, group, symmetric, dtype)
        tensors |= {f"{module}.{kind}": tensor.contiguous() for kind, tensor in pack(found[module], bits).items()}
    save_file(tensors, folder / "model.safetensors")
    return found


MODULES = ("model.layers.0.self_attn.k_proj", "model.layers.1.mlp.down_proj")


def both(teacher: Path, folder: Path, layout: str, **asked: object) -> list[tuple[dict[str, Tensor], Tensor]]:
    """Of every module its tensors as stored, and our matrix rounded to the type of its scales."""
    save_packed(teacher, folder, layout, **asked)
    opened, held = Checkpoint.open(folder), load_file(folder / "model.safetensors")
    found = []
    for module in MODULES:
        tensors = {name.removeprefix(f"{module}."): value for name, value in held.items() if name.startswith(module)}
        scale = tensors.get("scales", tensors.get("weight_scale"))
        assert scale is not None
        found.append((tensors, opened.tensor(f"{module}.weight").to(scale.dtype)))
    return found
