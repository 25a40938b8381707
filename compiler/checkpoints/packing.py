"""A checkpoint's packing, as its description names it: AWQ, GPTQ, AutoRound or compressed-tensors.

The description is in config.json, or in a file next to it, as older tools write it. Schemes that also round rows (W8A8)
are in ``scheme``. Every other scheme is refused here by its name.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from draftwood.compiler.checkpoints.fields import Fields, read_json
from draftwood.compiler.checkpoints.packed import Awq, Gptq, Packing, PackQuantized
from draftwood.errors import CheckpointError

CONFIG = "quantization_config"
# llm-compressor's first name of it, which vLLM reads, too.
OLD_CONFIG = "compression_config"
COMPRESSED_TENSORS = "compressed-tensors"
# Descriptions in their own files, and whose they are.
FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}
_PACKED = "pack-quantized"
_ROUNDED = ("int-quantized", "naive-quantized")
_BITS = {"gptq": (4, 8), "awq": (4,)}
_WAY_OUT = (
    "take its AWQ, GPTQ or compressed-tensors version, or the original one, which draftwood quantize turns into W8A8"
)
# Fields of gptqmodel, AutoRound and compressed-tensors for rotations that no tensor of the files tells of.
_ROTATIONS = ("rotation", "rotation_config", "transform_config")
# Unsupported methods and formats, and why none is whole numbers with a scale and a zero a group.
_REASONS = {
    "bitsandbytes": "a codebook of 16 numbers, with scales that are rounded themselves",
    "torchao": "subclasses of tensors",
    "gguf": "llama.cpp's blocks",
    "marlin": "the order of one GPU kernel",
    "marlin-24": "the order of one GPU kernel, and every second weight left out",
    "modelopt": "floating point of 4 or 8 bits",
    **dict.fromkeys(("mxfp4", "mxfp4-pack-quantized", "nvfp4-pack-quantized"), "floating point of 4 bits"),
    **dict.fromkeys(("fp8", "fbgemm_fp8", "float-quantized"), "floating point of 8 bits"),
}


def packing_of(fields: Fields) -> Packing | None:
    """The packing that a teacher's config.json describes; None if its matrices are not packed.

    Raises:
        CheckpointError: an unsupported scheme, or a description that contradicts itself.
    """
    config, method = _described(fields)
    if config is None:
        return None
    for name in _ROTATIONS:
        if config.get(name):
            config.fail(name, "null, since rows are rotated while a step runs; take a version without, or the original")
    if method == COMPRESSED_TENSORS:
        return _compressed_tensors(config)
    if method in ("gptq", "gptqmodel"):
        return _gptq(config)
    if method == "awq":
        return _awq(config)
    if method in ("auto-round", "auto_round", "intel/auto-round"):
        return _auto_round(config)
    raise _refused(config, method)


def description_files(folder: Path) -> list[Path]:
    """The files next to config.json that describe the packing of matrices."""
    return [folder / name for name in FILES if (folder / name).is_file()]


def described_in(fields: Fields) -> Fields | None:
    """What a config.json says of its quantisation; None if nothing. The older object may speak of sparsity alone."""
    if fields.get(CONFIG) is not None:
        return fields.nested(CONFIG)
    older = fields.nested(OLD_CONFIG)
    return older if older.get("quant_method") else None


def _described(fields: Fields) -> tuple[Fields | None, Any]:
    if (config := described_in(fields)) is not None:
        older = "gptq" if "desc_act" in config.values else None
        bits_and_bytes = config.get("load_in_8bit") or config.get("load_in_4bit")
        return config, config.get("quant_method", "bitsandbytes" if bits_and_bytes else older)
    for name, method in FILES.items():
        if (path := fields.path.parent / name).is_file():
            return Fields(path, read_json(path)), method
    return None, None


def _refused(config: Fields, kind: object) -> CheckpointError:
    reason = _REASONS.get(str(kind))
    return CheckpointError(
        f"{config.path}: the quantisation is of {kind!r}{f', {reason}' if reason else ''}; expected AWQ gemm, GPTQ,"
        f" AutoRound, or compressed-tensors with four or eight bits a weight (W4A16, W8A16) or W8A8; {_WAY_OUT}"
    )


def _awq(config: Fields, differing: str | None = None) -> Packing:
    """autoawq calls the layout ``version``, transformers ``format`` and gptqmodel ``checkpoint_format``; a ``backend``
    is the kernel of one machine, but for llm-awq."""
    if config.get("backend") == "llm-awq":
        config.fail("backend", f"'gemm' of autoawq; {_WAY_OUT}")
    for name in ("version", "format", "checkpoint_format"):
        if str(config.get(name, "gemm")).lower() != "gemm":
            config.fail(name, f"'gemm' of autoawq; {_WAY_OUT}")
    bits, group = (
        config.get("bits", config.get("w_bit")),
        config.get("group_size", config.get("q_group_size")),
    )
    all_of = _parts(Fields(config.path, config.values | {"bits": bits, "group_size": group}), differing)
    return Awq(
        title="AWQ gemm",
        bits=_unique(_bits(part, "awq") for part in all_of),
        groups=_unique(_group(part) for part in all_of),
        symmetric=(False, True),
    )


def _gptq(config: Fields) -> Packing:
    form = config.get("checkpoint_format", config.get("format", "gptq"))
    if form not in ("gptq", "gptq_v2") or config.flag("is_marlin_format", False):
        raise _refused(config, "marlin" if config.get("is_marlin_format") else form)
    return _grouped(config, "GPTQ v2" if form == "gptq_v2" else "GPTQ v1", "dynamic", form == "gptq")


def _auto_round(config: Fields) -> Packing:
    form = str(config.get("packing_format", config.get("backend", "auto_round:auto_gptq")))
    for part in _parts(config, "extra_config"):
        if part.get("data_type", "int") != "int" or part.whole("act_bits", 16) < 16:
            part.fail(
                "act_bits" if part.get("data_type", "int") == "int" else "data_type", f"weights in int; {_WAY_OUT}"
            )
    if "marlin" in form:
        raise _refused(config, "marlin")
    if form.endswith("awq"):
        return _awq(config, "extra_config")
    # Its own kernels read zeros as they are, those of AutoGPTQ add one.
    less_one = {"auto_round:auto_gptq": True, "auto_round": False, "auto_round:gptqmodel": False}
    if form not in less_one:
        config.fail("packing_format", f"{' or '.join(map(repr, less_one))} or 'auto_round:auto_awq'; {_WAY_OUT}")
    return _grouped(config, f"AutoRound ({form})", "extra_config", less_one[form])


def _grouped(config: Fields, title: str, differing: str, less_one: bool) -> Packing:
    """GPTQ's layout; ``differing`` is the field of the matrices that differ."""
    if config.get("pack_dtype", "int32") != "int32":
        config.fail("pack_dtype", f"'int32'; {_WAY_OUT}")
    all_of = _parts(config, differing)
    return Gptq(
        title=title,
        bits=_unique(_bits(part, "gptq") for part in all_of),
        groups=_unique(_group(part) for part in all_of),
        symmetric=_unique(part.flag("sym", True) for part in all_of),
        less_one=less_one,
    )


def _parts(config: Fields, differing: str | None) -> list[Fields]:
    """The description itself, and as it is for each entry of the field of the matrices that differ."""
    all_of, others = [config], config.nested(differing).values if differing else {}
    for fields in others.values():
        if fields is not None and not isinstance(fields, dict):
            config.fail(str(differing), "an object of objects")
        # 16 bits, or a name that begins with "-:", mark a matrix that is not packed.
        if fields and fields.get("bits", 4) != 16:
            named = {field: value for field, value in fields.items() if value is not None}
            all_of.append(Fields(config.path, config.values | named))
    return all_of


def _compressed_tensors(config: Fields) -> Packing | None:
    form = config.get("format")
    if form not in (_PACKED, *_ROUNDED):
        raise _refused(config, form)
    if config.get("kv_cache_scheme"):
        config.fail("kv_cache_scheme", f"null; {_WAY_OUT}")
    if form in _ROUNDED:
        return None
    groups = config.nested("config_groups")
    if not groups.values:
        config.fail("config_groups", "at least one group")
    weights = [_weights(groups.nested(name)) for name in groups.values]
    return PackQuantized(
        title="compressed-tensors pack-quantized",
        bits=_unique(_bits(part, "gptq", "num_bits") for part in weights),
        groups=_unique(_group(part) if part.get("strategy") == "group" else None for part in weights),
        symmetric=_unique(part.flag("symmetric", True) for part in weights),
    )


def _weights(group: Fields) -> Fields:
    """The description of a compressed-tensors group's weights."""
    for name in ("input_activations", "output_activations"):
        if group.get(name) is not None:
            group.fail(name, f"null with {_PACKED!r}, since rows are not rounded (W4A16, W8A16); {_WAY_OUT}")
    if group.get("format", _PACKED) != _PACKED:
        group.fail("format", f"{_PACKED!r} in every group; {_WAY_OUT}")
    weights = group.nested("weights")
    known = {"type": ("int",), "strategy": ("group", "channel"), "dynamic": (False,), "actorder": ("weight", "static")}
    for name, values in known.items():
        optional = name != "strategy"
        if weights.get(name) not in values and not (optional and weights.get(name) is None):
            weights.fail(name, f"{' or '.join(map(repr, values))}; {_WAY_OUT}")
    return weights


def _bits(config: Fields, of: str, name: str = "bits") -> int:
    bits = config.get(name)
    if bits not in _BITS[of] or isinstance(bits, (bool, float)):
        config.fail(name, f"{' or '.join(map(str, _BITS[of]))}; {_WAY_OUT}")
    return int(bits)


def _group(config: Fields) -> int | None:
    """Inputs of a group; None for all of a row."""
    size = config.whole("group_size")
    if size != -1 and size < 1:
        config.fail("group_size", "inputs of a group, or -1 for all of a row")
    return None if size == -1 else size


def _unique(values: Iterator[Any]) -> tuple[Any, ...]:
    return tuple(dict.fromkeys(values))
