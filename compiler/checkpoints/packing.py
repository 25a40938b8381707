"""How a checkpoint packs its matrices, by what it says of itself: AWQ, GPTQ, AutoRound or compressed-tensors.

The description is ``quantization_config`` of config.json, or a file of its own beside it, as older tools write it.
Schemes that also round rows (W8A8) are in ``scheme``; every other one is refused here by its name.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from draftwood.compiler.checkpoints.fields import Fields, read_json
from draftwood.compiler.checkpoints.packed import Awq, Gptq, Packing, PackQuantized
from draftwood.errors import CheckpointError

CONFIG = "quantization_config"
COMPRESSED_TENSORS = "compressed-tensors"
# Descriptions in files of their own, and whose they are.
FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
_PACKED = "pack-quantized"
_ROUNDED = ("int-quantized", "naive-quantized")
_BITS = {"gptq": (4, 8), "awq": (4,)}
_WAY_OUT = (
    "take its AWQ, GPTQ or compressed-tensors version, or the original one, of which draftwood quantize makes W8A8"
)
# Of methods and formats that people have: why no whole numbers with a scale and a zero a group are in them.
_REASONS = {
    "bitsandbytes": "a codebook of 16 numbers, with scales that are rounded themselves",
    "torchao": "subclasses of tensors",
    "gguf": "llama.cpp's blocks",
    "marlin": "the order of one GPU kernel",
    "marlin-24": "the order of one GPU kernel, and every second weight left out",
    **dict.fromkeys(("mxfp4", "mxfp4-pack-quantized", "nvfp4-pack-quantized", "modelopt"), "floating point of 4 bits"),
    **dict.fromkeys(("fp8", "fbgemm_fp8", "float-quantized"), "floating point of 8 bits"),
}


def packing_of(fields: Fields) -> Packing | None:
    """How the matrices of the teacher whose config.json this is are packed; None where they are not.

    Raises:
        CheckpointError: a scheme without a form here, or a description that contradicts itself.
    """
    said, method = _described(fields)
    if said is None:
        return None
    if method == COMPRESSED_TENSORS:
        return _compressed_tensors(said)
    if method in ("gptq", "gptqmodel"):
        return _gptq(said)
    if method == "awq":
        return _awq(said)
    if method in ("auto-round", "auto_round", "intel/auto-round"):
        return _auto_round(said)
    raise _refused(said, method)


def description_files(folder: Path) -> list[Path]:
    """The files beside config.json that describe how matrices are packed."""
    return [folder / name for name in FILES if (folder / name).is_file()]


def _described(fields: Fields) -> tuple[Fields | None, Any]:
    if fields.get(CONFIG) is not None:
        said = fields.nested(CONFIG)
        return said, said.get("quant_method", "gptq" if "desc_act" in said.values else None)
    for name, method in FILES.items():
        if (path := fields.path.parent / name).is_file():
            return Fields(path, read_json(path)), method
    return None, None


def _refused(said: Fields, kind: object) -> CheckpointError:
    reason = _REASONS.get(str(kind))
    return CheckpointError(
        f"{said.path}: {CONFIG} is of {kind!r}{f', {reason}' if reason else ''}; expected AWQ gemm, GPTQ, AutoRound, or"
        f" compressed-tensors with four or eight bits a weight (W4A16, W8A16) or W8A8; {_WAY_OUT}"
    )


def _awq(said: Fields) -> Packing:
    version = str(said.get("version", "gemm")).lower()
    if version != "gemm" or said.get("backend", "autoawq") != "autoawq":
        said.fail("version" if version != "gemm" else "backend", f"'gemm' of autoawq; {_WAY_OUT}")
    bits, group = said.get("bits", said.get("w_bit")), said.get("group_size", said.get("q_group_size"))
    named = Fields(said.path, said.values | {"bits": bits, "group_size": group})
    return Awq(title="AWQ gemm", bits=(_bits(named, "awq"),), groups=(_group(named),), symmetric=(False, True))


def _gptq(said: Fields) -> Packing:
    form = said.get("checkpoint_format", said.get("format", "gptq"))
    if form not in ("gptq", "gptq_v2") or said.flag("is_marlin_format", False):
        raise _refused(said, "marlin" if said.get("is_marlin_format") else form)
    return _grouped(said, "GPTQ v2" if form == "gptq_v2" else "GPTQ v1", "dynamic", form == "gptq")


def _auto_round(said: Fields) -> Packing:
    form = str(said.get("packing_format", said.get("backend", "auto_round:auto_gptq")))
    if said.get("data_type", "int") != "int" or said.whole("act_bits", 16) < 16:
        said.fail("act_bits" if said.get("data_type", "int") == "int" else "data_type", f"weights in int; {_WAY_OUT}")
    if "marlin" in form:
        raise _refused(said, "marlin")
    if form.endswith("awq"):
        return _awq(said)
    # Its own kernels read zeros as they are, those of AutoGPTQ add one.
    less_one = {"auto_round:auto_gptq": True, "auto_round": False, "auto_round:gptqmodel": False}
    if form not in less_one:
        said.fail("packing_format", f"{' or '.join(map(repr, less_one))} or 'auto_round:auto_awq'; {_WAY_OUT}")
    return _grouped(said, f"AutoRound ({form})", "extra_config", less_one[form])


def _grouped(said: Fields, title: str, differing: str, less_one: bool) -> Packing:
    """GPTQ's layout; ``differing`` is the field with what is otherwise in some matrices."""
    all_of = [said]
    for name in said.nested(differing).values:
        own = said.nested(differing).values[name]
        if own is not None and not isinstance(own, dict):
            said.fail(differing, "an object of objects")
        # 16 bits there, or a name that begins with -: says that a matrix is not packed.
        if own and own.get("bits", 4) != 16:
            named = {field: value for field, value in own.items() if value is not None}
            all_of.append(Fields(said.path, said.values | named))
    return Gptq(
        title=title,
        bits=_unique(_bits(one, "gptq") for one in all_of),
        groups=_unique(_group(one) for one in all_of),
        symmetric=_unique(one.flag("sym", True) for one in all_of),
        less_one=less_one,
    )


def _compressed_tensors(said: Fields) -> Packing | None:
    form = said.get("format")
    if form in _ROUNDED:
        return None
    if form != _PACKED:
        raise _refused(said, form)
    for name in ("kv_cache_scheme", "transform_config"):
        if said.get(name):
            said.fail(name, f"null; {_WAY_OUT}")
    groups = said.nested("config_groups")
    if not groups.values:
        said.fail("config_groups", "at least one group")
    weights = [_weights(groups.nested(name)) for name in groups.values]
    return PackQuantized(
        title="compressed-tensors pack-quantized",
        bits=_unique(_bits(one, "gptq", "num_bits") for one in weights),
        groups=_unique(_group(one) if one.get("strategy") == "group" else None for one in weights),
        symmetric=_unique(one.flag("symmetric", True) for one in weights),
    )


def _weights(group: Fields) -> Fields:
    """What a group of compressed-tensors says of its weights."""
    for name in ("input_activations", "output_activations"):
        if group.get(name) is not None:
            group.fail(name, f"null beside {_PACKED!r}, for rows are not rounded (W4A16, W8A16); {_WAY_OUT}")
    if group.get("format", _PACKED) != _PACKED:
        group.fail("format", f"{_PACKED!r} in every group; {_WAY_OUT}")
    said = group.nested("weights")
    known = {"type": ("int",), "strategy": ("group", "channel"), "dynamic": (False,), "actorder": ("weight", "static")}
    for name, values in known.items():
        optional = name != "strategy"
        if said.get(name) not in values and not (optional and said.get(name) is None):
            said.fail(name, f"{' or '.join(map(repr, values))}; {_WAY_OUT}")
    return said


def _bits(said: Fields, of: str, name: str = "bits") -> int:
    bits = said.get(name)
    if bits not in _BITS[of] or isinstance(bits, (bool, float)):
        said.fail(name, f"{' or '.join(map(str, _BITS[of]))}; {_WAY_OUT}")
    return int(bits)


def _group(said: Fields) -> int | None:
    """Inputs of a group; None for all of a row."""
    size = said.whole("group_size")
    if size != -1 and size < 1:
        said.fail("group_size", "inputs of a group, or -1 for all of a row")
    return None if size == -1 else size


def _unique(values: Iterator[Any]) -> tuple[Any, ...]:
    return tuple(dict.fromkeys(values))
