"""The page of ``draftwood inspect CHECKPOINT``: the recognised teacher or drafter, before anyone builds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from draftwood.compiler.checkpoints.fields import read_json
from draftwood.compiler.drafters.registry import kind_named, kind_of, open_drafter
from draftwood.compiler.teachers.checkpoint import Checkpoint, expected_tensors
from draftwood.compiler.teachers.folder import TeacherFolder
from draftwood.compiler.teachers.formats import format_of, has_tokenizer
from draftwood.compiler.teachers.precisions import matrices_in, precisions
from draftwood.compiler.teachers.registry import FAMILIES
from draftwood.errors import CheckpointError
from draftwood.tools.tokenizers import tokenizer_of

# Fields that no teacher has.
_OF_DRAFTERS = {
    *("draft_vocab_size", "speculators_model_type", "dflash_config", "block_size", "aux_layer_ids", "markov_rank"),
    *("num_depths", "medusa_num_heads", "medusa_num_layers", "eagle_config"),
}


def checkpoint_figures(path: Path, teacher: Path | None) -> dict[str, Any]:
    """A teacher's figures, or a drafter's: of a checkpoint next to a ``teacher``, or names no family of teachers.

    Raises:
        CheckpointError: it is neither, or holds something that has no form in the compiler; the message names it.
    """
    if teacher is not None:
        return drafter_figures(path, _opened(teacher))
    if format_of(path) is not TeacherFolder:
        return teacher_figures(path)
    config = path / "config.json"
    fields = read_json(config) if config.is_file() else {}
    published = [[family.architecture] for family in FAMILIES.values()]
    # Some EAGLE-3 drafters call themselves a Llama.
    if fields.get("architectures") in published and "draft_vocab_size" not in fields:
        return teacher_figures(path)
    try:
        kind = kind_of(path)
    except CheckpointError:
        if not fields.keys() & _OF_DRAFTERS:
            return teacher_figures(path)  # which refuses it as every command does that takes a teacher
        raise
    return {"kind": "drafter", "path": str(path), "drafter": kind.name, "title": kind.title}


def teacher_figures(folder: Path) -> dict[str, Any]:
    """A teacher by its config.json and, if they exist, the headers of its weights."""
    opened = _opened(folder)
    config = opened.config
    return {
        "kind": "teacher",
        "path": str(folder),
        **asdict(config),
        "parameters": sum(map(math.prod, expected_tensors(config).values())),
        "cache_bytes_a_slot": sum(rows.elements() for rows in config.buffers) * opened.dtype.itemsize,
        "weights": _weights(opened) if opened.entries else None,
        "packed": _packed(opened),
        "precisions": _precisions(opened),
        "tokenizer": _tokenizer(folder),
    }


def _opened(folder: Path) -> Checkpoint:
    """With the headers of its weights, or without if it is a configuration alone."""
    return Checkpoint.open(folder) if any(folder.glob("*.safetensors")) else Checkpoint.describe(folder)


def _weights(opened: Checkpoint) -> dict[str, Any]:
    files = {entry.file for entry in opened.entries.values()}
    return {"tensors": len(opened.entries), "files": len(files), "bytes": sum(file.stat().st_size for file in files)}


def _packed(opened: Checkpoint) -> list[dict[str, Any]]:
    """Which matrices are packed, and how: a record for all that have as many bits and as large groups."""
    modules_of: dict[tuple[str, int, int, bool], list[str]] = {}
    for matrix in opened.packed.values():
        alike = (matrix.title, matrix.bits, matrix.shape[1] // matrix.groups if matrix.groups > 1 else 0, matrix.rounds)
        modules_of.setdefault(alike, []).append(matrix.module)
    return [
        {"layout": layout, "bits": bits, "group": group or None, "rounded": rounds, "modules": modules}
        for (layout, bits, group, rounds), modules in modules_of.items()
    ]


def _precisions(opened: Checkpoint) -> dict[str, dict[str, int]]:
    """By precision of a CPU's bundle, how many matrices are kept, and how many are rounded to each form."""
    return {name: matrices_in(opened, name) for name in precisions(opened) if name != "exact"}


def _tokenizer(folder: Path) -> dict[str, Any] | None:
    if not has_tokenizer(folder):
        return None
    tokenizer = tokenizer_of(folder)
    return {"chat": tokenizer.has_chat, "tokens": tokenizer.size}


def drafter_figures(path: Path, teacher: Checkpoint) -> dict[str, Any]:
    """A drafter by its teacher: its kind, the states it reads, the tokens it proposes, its sizes."""
    opened = open_drafter(path, teacher)
    model = opened.model
    sizes = asdict(model.config)
    block = sizes.pop("block", None)
    sizes.pop("quantised", None)
    return {
        "kind": "drafter",
        "path": str(path),
        "drafter": model.kind,
        "title": kind_named(model.kind).title,
        "teacher": {"path": str(teacher.path), "family": teacher.config.family, "layers": teacher.config.layers},
        "aux_layers": list(model.aux_layers),
        "quantised": list(model.quantised),
        "dtype": str(opened.checkpoint.dtype).removeprefix("torch."),
        "tensors": len({key for name in opened.checkpoint.names() for key in opened.checkpoint.keys(name)}),
        "sizes": {name: value for name, value in sizes.items() if name != "aux_layers"},
        "block": block,
    }


def checkpoint_text(figures: dict[str, Any]) -> str:
    """`checkpoint_figures` for people."""
    rows = _teacher_rows(figures) if figures["kind"] == "teacher" else _drafter_rows(figures)
    title = f"{figures['kind']} {figures['path']}"
    width = max(len(name) for name, _ in rows)
    return "\n".join([title, *(f"  {name:<{width}}  {value}" for name, value in rows)])


def _teacher_rows(figures: dict[str, Any]) -> list[tuple[str, str]]:
    weights, tokenizer = figures["weights"], figures["tokenizer"]
    text = "none; prompts are given as token ids"
    if tokenizer:
        chat = "with a chat template" if tokenizer["chat"] else "without a chat template"
        text = f"{tokenizer['tokens']} tokens, {chat}"
    stored = "none here; --weights none builds graphs without them"
    if weights:
        stored = f"{weights['tensors']} tensors, {weights['bytes'] / 1e9:.3g} GB, files: {weights['files']}"
    return [
        ("family", figures["family"]),
        ("parameters", f"{figures['parameters']:,}, {figures['dtype']}"),
        *([("quantised", f"W8A8, {len(figures['quantised'])} linear layers")] if figures["quantised"] else []),
        *((f"{form['bits']} bits", _packed_text(form)) for form in figures["packed"]),
        *((f"as {name}", _rounded_text(counts)) for name, counts in figures["precisions"].items()),
        *_block_rows(figures),
        ("context", f"{figures['max_positions']} tokens"),
        ("cache", f"{figures['cache_bytes_a_slot'] / 1024:g} KiB a slot in {figures['dtype']}"),
        (
            "vocabulary",
            f"{figures['vocabulary']}, output matrix {'is the embedding' if figures['tied'] else 'of its own'}",
        ),
        ("ends a text", ", ".join(map(str, figures["eos"])) or "nothing"),
        ("tokenizer", text),
        ("weights", stored),
    ]


def _packed_text(packed: Mapping[str, Any]) -> str:
    """Layout, groups, and how many modules of each kind."""
    kinds = Counter(module.rpartition(".")[2] for module in packed["modules"])
    group = f"groups of {packed['group']}" if packed["group"] else "a scale an output"
    rounded = ", rounded by nbits" if packed["rounded"] else ""
    return f"{packed['layout']}, {group}{rounded}: {', '.join(f'{count} {kind}' for kind, count in kinds.items())}"


def _rounded_text(counts: Mapping[str, int]) -> str:
    forms = {"four_bits": "four bits", "eight_bits": "eight bits", "w8a8": "W8A8"}
    rounded = [f"{counts[form]} rounded to {name}" for form, name in forms.items() if counts[form]]
    return ", ".join(([f"{counts['kept']} matrices kept"] if counts["kept"] else []) + rounded)


def _block_rows(block: Mapping[str, Any]) -> list[tuple[str, str]]:
    biased = " and ".join(n for n, key in (("q, k, v", "qkv_bias"), ("o", "o_bias")) if block[key]) or "nothing"
    heads = f"{block['heads']} query, {block['kv_heads']} key/value, {block['head_dim']} wide"
    return [
        ("layers", f"{block['layers']}, {block['hidden']} wide, {block['intermediate']} inside"),
        ("heads", heads + (", q and k normalised" if block["qk_norm"] else "")),
        ("biases on", biased),
        ("rope", rope_text(block["rope_theta"], block["rope_scaling"])),
    ]


def rope_text(theta: float, scaling: Mapping[str, Any] | None) -> str:
    """Base and scaling; of the scaling the fields that its kind reads."""
    if scaling is None:
        return f"default, base {theta:g}"
    original = f" of {scaling['original_max_positions']} tokens" if scaling["kind"] != "linear" else ""
    scaled = f", attention times {scaling['attention_factor']:.4g}" if scaling["kind"] == "yarn" else ""
    return f"{scaling['kind']}, base {theta:g}, stretched {scaling['factor']:g} times{original}{scaled}"


def _drafter_rows(figures: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [("kind", f"{figures['drafter']}: {figures['title']}")]
    if "teacher" not in figures:
        return [*rows, ("next", "inspect DRAFTER TEACHER says what of it, and whether it fits")]
    teacher, states = figures["teacher"], figures["aux_layers"]
    read = f"the states entering layers {', '.join(map(str, states))}" if states else "the state after the last norm"
    return [
        *rows,
        ("fits", f"{teacher['path']}, {teacher['family']} of {teacher['layers']} layers"),
        ("reads", read),
        *([("quantised", f"W8A8, {len(figures['quantised'])} linear layers")] if figures["quantised"] else []),
        *((name.replace("_", " "), str(value)) for name, value in figures["sizes"].items()),
        *(_block_rows(figures["block"]) if figures["block"] else []),
        ("tensors", f"{figures['tensors']} in {figures['dtype']}"),
    ]
