"""Students of a FastEagle cascade, with a cell and without: begun for a training, and read back from its files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from draftwood.compiler.drafters.common.block import Sizes
from draftwood.compiler.drafters.common.training import aux_layers, read_trained, teacher_sizes
from draftwood.compiler.drafters.fasteagle.cell_training import CellStudent
from draftwood.compiler.drafters.fasteagle.training import FastEagleStudent
from draftwood.errors import RequestError

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM


def begin(teacher: LlamaForCausalLM, options: Mapping[str, Any], ids_V: Tensor | None) -> FastEagleStudent:
    """A student of the chosen levels, states, sizes and terms of the loss."""
    sizes, aux = _sizes(options, teacher_sizes(teacher)), aux_layers(options, teacher)
    own = {name: options[name] for name in ("token_weight", "feature_weight", "last_only")}
    kind: type[FastEagleStudent] = FastEagleStudent
    if options["cell"]:
        kind, own = CellStudent, own | {name: options[name] for name in ("cell", "shortlist")}
    student = kind(teacher, sizes, options["levels"], aux, ids_V, **own)
    student.negatives, student.shared_noise = options["negatives"], options["shared_noise"]
    return student


def _sizes(options: Mapping[str, Any], wide: Sizes) -> Sizes:
    """The dimensions of a FastEagle layer: those of the teacher's, or narrower where the options say so."""
    fields_of = {"intermediate": "intermediate_size", "heads": "num_attention_heads", "kv_heads": "num_key_value_heads"}
    own = replace(wide, **{field: options[name] for name, field in fields_of.items() if options[name] is not None})
    group = wide.num_attention_heads // wide.num_key_value_heads
    for name, size, most in (
        ("intermediate", own.intermediate_size, wide.intermediate_size),
        ("kv_heads", own.num_key_value_heads, wide.num_key_value_heads),
        ("heads", own.num_attention_heads, group * own.num_key_value_heads),
    ):
        if not 1 <= size <= most:
            raise RequestError(f"{name} is {size}; expected 1 to {most}: a layer begins as part of the teacher's last")
    if own.num_attention_heads % own.num_key_value_heads:
        raise RequestError(
            f"heads is {own.num_attention_heads}; expected a multiple of kv_heads {own.num_key_value_heads}"
        )
    return own


def read_back(folder: Path, teacher: LlamaForCausalLM) -> tuple[FastEagleStudent, dict[str, Tensor]]:
    """A trained drafter as a student, and its values."""
    config, sizes, tensors, ids_V = read_trained(folder, "FastEagleDrafter")
    levels, aux = config["num_hidden_layers"], tuple(config["aux_layer_ids"])
    if "cell_size" not in config:
        return FastEagleStudent(teacher, sizes, levels, aux, ids_V), tensors
    own = {"cell": config["cell_size"], "shortlist": config["cell_shortlist"]}
    return CellStudent(teacher, sizes, levels, aux, ids_V, **own), tensors
