"""Makes a teacher and its drafter larger without changing their function, to take timings at a size nobody trained.

    python -m draftwood.tools.demo.widen SOURCE TARGET --hidden 2048 --layers 22 --heads 32 --kv-heads 4

The text stays that of the small teacher, while every matrix has the large shape. New rows that nothing reads
hold small random values, so no kernel can take a short cut. Exact in real arithmetic; in floating point the
gains and eps are rounded once and sums run in another order, so logits agree to rounding. Where the hidden
size grows by a power of four, gains and eps are scaled without rounding.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from draftwood.compiler.drafters.common.checkpoint import DrafterCheckpoint
from draftwood.compiler.drafters.common.config import AUX_STATES, DrafterConfig
from draftwood.compiler.drafters.kinds import OpenedDrafter
from draftwood.compiler.drafters.medusa.checkpoint import MedusaCheckpoint
from draftwood.compiler.teachers.checkpoint import Checkpoint, expected_tensors, tokenizer_files
from draftwood.compiler.teachers.config import DType, TeacherConfig
from draftwood.errors import RequestError
from draftwood.tools.script import refusing

# H hidden size, H' the widened one; q heads of one key/value head form a group of g, widened g'.

# Which axis each dimension of a tensor lies along, by the end of its name.
_AXES = {
    "embed_tokens.weight": ("vocabulary", "hidden"),
    "lm_head.weight": ("vocabulary", "hidden"),
    "norm.weight": ("hidden",),
    "q_proj.weight": ("query", "hidden"),
    "k_proj.weight": ("key", "hidden"),
    "v_proj.weight": ("key", "hidden"),
    "o_proj.weight": ("hidden", "query"),
    "gate_proj.weight": ("inner", "hidden"),
    "up_proj.weight": ("inner", "hidden"),
    "down_proj.weight": ("hidden", "inner"),
    "q_proj.bias": ("query",),
    "k_proj.bias": ("key",),
    "v_proj.bias": ("key",),
    "o_proj.bias": ("hidden",),
}
# What drafters have beside a Llama's tensors, and EAGLE-3's, whose q, k and v read two hidden states side by side.
_DRAFTER_AXES = _AXES | {
    "lm_head.weight": ("draft vocabulary", "hidden"),
    "fc.weight": ("hidden", "states"),
    "input_norm.weight": ("states",),
    **{f"fc_norm.{i}.weight": ("hidden",) for i in range(AUX_STATES)},
}
_FASTEAGLE_AXES = _DRAFTER_AXES | {"proj.weight": ("hidden", "pair")}
_EAGLE3_AXES = _DRAFTER_AXES | {
    f"{side}_proj.weight": (axis, "pair") for side, axis in (("q", "query"), ("k", "key"), ("v", "key"))
}
# What these write is read through zero columns of o_proj and down_proj, or reads zero hidden columns.
_FREE = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_SPREAD = 0.02
_SIZES = ("hidden", "intermediate", "layers", "heads", "kv_heads")
# Where a drafter's config.json lists the teacher's states, at the top or in eagle_config.
_AUX_IDS = "eagle_aux_hidden_state_layer_ids"


def widen(
    source: Path,
    target: Path,
    *,
    hidden: int | None = None,
    intermediate: int | None = None,
    layers: int | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    dtype: DType | None = None,
    seed: int = 0,
) -> TeacherConfig:
    """Writes the teacher of ``source`` to a new folder ``target`` in a larger shape; None keeps a size.

    The residual stream is padded with zeros. Its mean square over H' is H / H' times the one over H, so with
    eps' = eps H / H' the norm's quotient grows by sqrt(H' / H), and gains scaled by sqrt(H / H') undo it.
    Query head m of key/value head j moves to slot j g' + m, so it reads the same keys. head_dim stays.

    Returns:
        The configuration that was written.

    Raises:
        CheckpointError: the source is not a supported teacher.
        RequestError: the target exists, or a size is smaller than the source's or does not fit the others.
    """
    teacher = Checkpoint.open(source)
    asked = (hidden, intermediate, layers, heads, kv_heads)
    sizes: dict[str, Any] = {
        name: getattr(teacher.config, name) if size is None else size for name, size in zip(_SIZES, asked, strict=True)
    }
    _check_sizes(teacher.config, sizes)
    eps = teacher.config.rms_norm_eps * teacher.config.hidden / sizes["hidden"]
    wide = replace(teacher.config, **sizes, rms_norm_eps=eps, dtype=dtype or teacher.config.dtype)
    with _new_folder(target) as folder:
        _write_config(source, folder, wide)
        _save(_teacher_tensors(teacher, wide, seed), folder / "model.safetensors")
        extra = [path for path in (source / "generation_config.json",) if path.is_file()]
        for path in tokenizer_files(source) + extra:
            shutil.copyfile(path, folder / path.name)
    return wide


def widen_medusa(
    source: Path, target: Path, teacher: TeacherConfig, *, hidden: int, dtype: DType | None = None
) -> None:
    """Writes Medusa heads of ``teacher`` for its widened form: a folder with medusa_lm_head.safetensors.

    A block x + silu(Wx + b) leaves the padding at zero when W and b are zero there, since silu(0) = 0; the
    columns of an output matrix that read the padding are zero.

    Raises:
        CheckpointError: the heads do not fit the teacher.
        RequestError: the target exists, or ``hidden`` is smaller than the teacher's.
    """
    heads = MedusaCheckpoint.open(source, teacher)
    if hidden < teacher.hidden:
        raise RequestError(f"hidden is {hidden}; expected at least the teacher's {teacher.hidden}")
    tensors = _medusa_tensors(heads, hidden, heads.dtype if dtype is None else getattr(torch, dtype))
    with _new_folder(target) as folder:
        _save(tensors, folder / "medusa_lm_head.safetensors")
        stated = {"medusa_num_heads": heads.heads, "medusa_num_layers": heads.blocks}
        (folder / "config.json").write_text(json.dumps(stated, indent=2) + "\n")


def widen_drafter(
    source: Path, target: Path, teacher: Path, wide: TeacherConfig, *, dtype: DType | None = None, seed: int = 0
) -> None:
    """Writes a drafter of the folder ``teacher`` for its widened form ``wide``: a folder with the same kind's files.

    Medusa heads are those of ``widen_medusa``. EAGLE-3's and FastEagle's blocks take the widened teacher's hidden
    size, grow in MLP width and heads as its blocks do, so that narrow blocks stay narrow, and are padded as those
    are; every hidden state that fc or another matrix reads beside others is padded in its own place. The teacher's
    new layers come last, so the states that it reads enter the layers they entered before; the ids are written out,
    for the usual ones depend on the number of layers.

    Raises:
        CheckpointError: the source is no drafter of this teacher.
        RequestError: the target exists, the drafter's hidden size is not the teacher's, or a size of ``wide`` is
            smaller than the drafter's or does not fit the others.
    """
    checkpoint = Checkpoint.open(teacher)
    opened = OpenedDrafter.open(source, checkpoint)
    drafter = opened.checkpoint
    if isinstance(drafter, MedusaCheckpoint):
        widen_medusa(source, target, checkpoint.config, hidden=wide.hidden, dtype=dtype)
        return
    small: DrafterConfig = drafter.config
    if small.block.hidden != small.target_hidden:
        raise RequestError(
            f"{source}: hidden size is {small.block.hidden}; expected {small.target_hidden}, as the teacher's: a"
            " drafter of another width is not widened"
        )
    sizes = _in_proportion(small.block, checkpoint.config, wide)
    _check_sizes(small.block, sizes)
    eps = small.block.rms_norm_eps * small.block.hidden / wide.hidden
    kept = str(drafter.dtype).removeprefix("torch.")
    block = replace(small.block, **sizes, rms_norm_eps=eps, dtype=dtype or kept)
    axes = _EAGLE3_AXES if opened.drafter.kind == "eagle3" else _FASTEAGLE_AXES
    with _new_folder(target) as folder:
        _write_drafter_config(drafter, folder, block)
        _save(_drafter_tensors(drafter, block, axes, seed), folder / "model.safetensors")


def _in_proportion(small: TeacherConfig, teacher: TeacherConfig, wide: TeacherConfig) -> dict[str, int]:
    """Sizes of a drafter's block that stand to those of the widened teacher as they stood to the teacher's."""

    def grown(size: int, whole: int, widened: int) -> int:
        return -(-size * widened // whole)

    kv_heads = grown(small.kv_heads, teacher.kv_heads, wide.kv_heads)
    group = grown(small.heads // small.kv_heads, teacher.heads // teacher.kv_heads, wide.heads // wide.kv_heads)
    return {
        "hidden": wide.hidden,
        "intermediate": grown(small.intermediate, teacher.intermediate, wide.intermediate),
        "heads": kv_heads * group,
        "kv_heads": kv_heads,
    }


def _drafter_tensors(
    drafter: DrafterCheckpoint[Any], wide: TeacherConfig, axes: Mapping[str, tuple[str, ...]], seed: int
) -> dict[str, Tensor]:
    """Every tensor of a widened drafter by its key in the source, and the map between the vocabularies."""
    small: DrafterConfig = drafter.config
    places = _places(small.block, wide) | {"draft vocabulary": torch.arange(small.draft_vocabulary)}
    for axis, states in (("pair", 2), ("states", AUX_STATES)):
        places[axis] = (torch.arange(states)[:, None] * wide.hidden + places["hidden"]).flatten()
    lengths = _lengths(wide) | {"draft vocabulary": small.draft_vocabulary}
    lengths |= {"pair": 2 * wide.hidden, "states": AUX_STATES * wide.hidden}
    gain = (small.block.hidden / wide.hidden) ** 0.5
    random = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, wide.dtype)
    tensors = {}
    for key in (key for part in drafter.parts.values() for key, _ in part):
        along = _along(key, axes)
        shape = tuple(lengths[axis] for axis in along)
        tensors[key] = _padded(key, drafter.read(key), shape, [places[axis] for axis in along], gain, dtype, random)
    if small.mapped:
        tensors["d2t"] = drafter.ids - torch.arange(small.draft_vocabulary)
    return tensors


def _write_drafter_config(drafter: DrafterCheckpoint[Any], folder: Path, wide: TeacherConfig) -> None:
    config: dict[str, Any] = json.loads(drafter.files[0].read_text())
    # The speculators layout nests the block's fields.
    block = config.get("transformer_layer_config") or config
    block |= _fields(wide, block)
    aux = list(drafter.config.aux_layers)
    config |= {"target_hidden_size": wide.hidden, "aux_layer_ids": aux}
    for fields in (config, config.get("eagle_config") or {}):
        if fields.get(_AUX_IDS) is not None:
            fields[_AUX_IDS] = aux
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _medusa_tensors(heads: MedusaCheckpoint, hidden: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Every tensor padded with zeros to the widened hidden size, by its key in the source."""
    tensors = {}
    for name, key in heads.keys.items():
        stored = heads.weight(name)
        shape = (stored.shape[0], hidden) if name.endswith(".out.weight") else (hidden,) * stored.ndim
        wide = torch.zeros(shape, dtype=dtype)
        wide[tuple(slice(size) for size in stored.shape)] = stored.to(dtype)
        tensors[key] = wide
    return tensors


def _check_sizes(small: TeacherConfig, sizes: Mapping[str, int]) -> None:
    for name, size in sizes.items():
        if size < getattr(small, name):
            raise RequestError(f"{name} is {size}; expected at least the source's {getattr(small, name)}")
    heads, kv_heads = sizes["heads"], sizes["kv_heads"]
    group = small.heads // small.kv_heads
    if heads % kv_heads or heads // kv_heads < group:
        raise RequestError(
            f"heads is {heads} for {kv_heads} kv_heads; expected a multiple, at least {group} for each,"
            " so that every query head keeps its key/value head"
        )
    if sizes["hidden"] % heads:
        raise RequestError(
            f"hidden is {sizes['hidden']}; expected a multiple of heads, {heads}: transformers refuses others"
        )


def _teacher_tensors(teacher: Checkpoint, wide: TeacherConfig, seed: int) -> dict[str, Tensor]:
    """Every tensor of the widened teacher, by its Hugging Face name."""
    places = _places(teacher.config, wide)
    gain = (teacher.config.hidden / wide.hidden) ** 0.5
    random = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, wide.dtype)
    tensors = {}
    for name, shape in expected_tensors(wide).items():
        stored = teacher.tensor(name) if name in teacher.entries else None
        along = [places[axis] for axis in _along(name, _AXES)]
        tensors[name] = _padded(name, stored, shape, along, gain, dtype, random)
    return tensors


def _along(name: str, axes: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """The axes of a tensor, by the longest end of its name that has an entry."""
    return axes[max((end for end in axes if name.endswith(end)), key=len)]


def _padded(
    name: str,
    stored: Tensor | None,
    shape: tuple[int, ...],
    places: Sequence[Tensor],
    gain: float,
    dtype: torch.dtype,
    random: torch.Generator,
) -> Tensor:
    """A tensor of the widened shape with ``stored``, None in a new layer, at ``places``; a norm's times ``gain``."""
    is_norm = "norm" in name
    if any(part in name for part in _FREE):
        filled = torch.randn(shape, generator=random) * _SPREAD
    else:  # norms of new layers read hidden states of any size, as the others do
        filled = torch.full(shape, gain if is_norm and stored is None else 0.0)
    wide = filled.to(dtype)
    if stored is not None:
        rows, *columns = places
        value = (stored.double() * gain if is_norm else stored).to(dtype)
        wide[(rows[:, None], *columns) if columns else rows] = value
    return wide


def _places(small: TeacherConfig, wide: TeacherConfig) -> dict[str, Tensor]:
    """Where each index of the source goes, int64, by axis."""
    group, wide_group = small.heads // small.kv_heads, wide.heads // wide.kv_heads
    head = torch.arange(small.heads)
    slot = head // group * wide_group + head % group
    query = slot[:, None] * small.head_dim + torch.arange(small.head_dim)
    return {
        "vocabulary": torch.arange(small.vocabulary),
        "hidden": torch.arange(small.hidden),
        "query": query.flatten(),
        "key": torch.arange(small.kv_heads * small.head_dim),
        "inner": torch.arange(small.intermediate),
    }


def _lengths(wide: TeacherConfig) -> dict[str, int]:
    """The widened lengths of the axes."""
    return {
        "vocabulary": wide.vocabulary,
        "hidden": wide.hidden,
        "query": wide.heads * wide.head_dim,
        "key": wide.kv_heads * wide.head_dim,
        "inner": wide.intermediate,
    }


def _fields(wide: TeacherConfig, config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of config.json that widening changes; ``config`` says how it spells the dtype."""
    return {
        "hidden_size": wide.hidden,
        "intermediate_size": wide.intermediate,
        "num_attention_heads": wide.heads,
        "num_key_value_heads": wide.kv_heads,
        "head_dim": wide.head_dim,
        "rms_norm_eps": wide.rms_norm_eps,
        "dtype" if "dtype" in config else "torch_dtype": wide.dtype,
    }


def _write_config(source: Path, folder: Path, wide: TeacherConfig) -> None:
    config: dict[str, Any] = json.loads((source / "config.json").read_text())
    config |= _fields(wide, config) | {"num_hidden_layers": wide.layers}
    if config.get("layer_types"):
        config["layer_types"] = ["full_attention"] * wide.layers
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    save_file(tensors, path, metadata={"format": "pt"})


@contextmanager
def _new_folder(target: Path) -> Iterator[Path]:
    """A folder that becomes ``target`` when the block ends well, and is removed when it does not."""
    if target.exists():
        raise RequestError(f"{target} exists; expected a folder that does not; remove it or name another")
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    part.mkdir(parents=True)
    try:
        yield part
        part.rename(target)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


@refusing
def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code, 2 when the input cannot be used."""
    parser = argparse.ArgumentParser(prog="draftwood.tools.demo.widen", description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, help="teacher folder")
    parser.add_argument("target", type=Path, help="folder to write; must not exist")
    for name in _SIZES:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help="new size (default: the source's)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: the source's")
    parser.add_argument("--seed", type=int, default=0, help="of the values that nothing reads")
    parser.add_argument("--drafter", nargs=2, type=Path, metavar=("SOURCE", "TARGET"), help="widen this drafter too")
    args = parser.parse_args(arguments)
    sizes = {name: getattr(args, name) for name in _SIZES}
    wide = widen(args.source, args.target, **sizes, dtype=args.dtype, seed=args.seed)
    if args.drafter:
        widen_drafter(*args.drafter, args.source, wide, dtype=args.dtype, seed=args.seed)
    shape = f"{wide.layers} layers of {wide.hidden}, {wide.heads} heads over {wide.kv_heads}"
    print(f"{args.target}: {shape}, {wide.dtype}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
