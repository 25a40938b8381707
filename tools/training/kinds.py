"""The kinds of drafters: how each is begun for training, and read back from its files."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import LlamaForCausalLM

from draftwood.compiler.drafters.medusa.checkpoint import MedusaCheckpoint
from draftwood.compiler.teachers.registry import read_config
from draftwood.errors import CheckpointError, RequestError
from draftwood.tools.training.block import Sizes
from draftwood.tools.training.drafter import Drafter, teacher_sizes
from draftwood.tools.training.eagle3_network import Eagle3
from draftwood.tools.training.fasteagle_network import FastEagle
from draftwood.tools.training.medusa_network import Medusa
from draftwood.tools.training.states import default_aux_layers

# V draft vocabulary

# What can be chosen of each kind, with the usual choice. Levels are Medusa's heads, EAGLE-3's steps of the
# training-time test and FastEagle's layers. No aux layers mean the usual three, no draft vocabulary the teacher's,
# no heads, key/value heads or MLP width those of the teacher's blocks.
OPTIONS: dict[str, dict[str, Any]] = {
    "medusa": {"levels": 4, "blocks": 1, "own_output": False},
    "eagle3": {"levels": 7, "aux_layers": None, "draft_vocab": None, "own_output": False},
    "fasteagle": {
        "levels": 4, "aux_layers": None, "draft_vocab": None, "token_weight": 1.0, "feature_weight": 1.0,
        "last_only": False, "heads": None, "kv_heads": None, "intermediate": None,
    },
}  # fmt: skip


def complete(kind: str, options: dict[str, Any]) -> dict[str, Any]:
    """The options of a kind, with the usual choice for what is not given.

    Raises:
        RequestError: an option is not of this kind, or its value makes no sense.
    """
    if foreign := sorted(options.keys() - OPTIONS[kind].keys()):
        raise RequestError(f"{foreign[0]}: not an option of {kind}; expected {', '.join(OPTIONS[kind])}")
    chosen = {**OPTIONS[kind], **options}
    if chosen["levels"] < 1 or chosen.get("blocks", 0) < 0 or (chosen.get("draft_vocab") or 1) < 1:
        raise RequestError("expected 1 or more levels and draft ids, and no negative number of blocks")
    weights = (chosen.get("token_weight", 1.0), chosen.get("feature_weight", 0.0))
    if min(weights) < 0 or max(weights) == 0:
        raise RequestError(f"loss weights {weights}: expected none below 0 and one above it")
    return chosen


def aux_layers(kind: str, options: dict[str, Any], teacher: LlamaForCausalLM) -> tuple[int, ...]:
    """The layers whose entering states the drafter reads; none for Medusa."""
    if kind == "medusa":
        return ()
    return tuple(options["aux_layers"] or default_aux_layers(teacher.config.num_hidden_layers))


def begin(kind: str, options: dict[str, Any], teacher: LlamaForCausalLM, ids_V: Tensor | None) -> Drafter:
    """A drafter that starts from the teacher's own weights, where the teacher lies; options are ``complete``."""
    aux, levels, drafter = aux_layers(kind, options, teacher), options["levels"], None
    if kind == "medusa":
        drafter = Medusa(teacher, levels, options["blocks"], options["own_output"])
    elif kind == "eagle3":
        drafter = Eagle3(teacher, teacher_sizes(teacher), levels, aux, ids_V, options["own_output"])
    else:
        terms = {name: options[name] for name in ("token_weight", "feature_weight", "last_only")}
        drafter = FastEagle(teacher, _sizes(options, teacher_sizes(teacher)), levels, aux, ids_V, **terms)
    drafter.to(teacher.device).start_from(teacher)
    return drafter


def _sizes(options: dict[str, Any], wide: Sizes) -> Sizes:
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


def load(folder: Path, teacher: LlamaForCausalLM, levels: int | None = None) -> Drafter:
    """A trained drafter, frozen. ``levels`` is how far an EAGLE-3 layer drafts; the other kinds know themselves.

    Raises:
        CheckpointError: the folder holds no drafter of this teacher.
    """
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder}: no config.json of a drafter ({error}); train one first") from None
    if "medusa_num_heads" in config:
        opened = MedusaCheckpoint.open(folder, read_config(Path(teacher.name_or_path)))
        drafter = Medusa(teacher, opened.heads, opened.blocks, not opened.tied)
        tensors = {f"model.{name}": opened.weight(name) for name in opened.names()}
    else:
        try:
            drafter, tensors = _published(folder, config, teacher, levels)
        except KeyError as error:
            raise CheckpointError(
                f"{folder / 'config.json'}: no field {error}; expected a drafter trained here"
            ) from None
    try:
        drafter.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(f"{folder}: not a drafter of this teacher ({reason}); train one for it") from None
    return drafter.to(teacher.device).requires_grad_(False).eval()


def _published(
    folder: Path, config: dict[str, Any], teacher: LlamaForCausalLM, levels: int | None
) -> tuple[Drafter, dict[str, Tensor]]:
    """An EAGLE-3 or FastEagle network of a folder's sizes, with its tensors."""
    with safe_open(folder / "model.safetensors", framework="pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    offsets_V, _ = tensors.pop("d2t", None), tensors.pop("t2d", None)
    ids_V = None if offsets_V is None else offsets_V + torch.arange(len(offsets_V))
    if (kind := config.get("architectures")) not in (["LlamaForCausalLMEagle3"], ["FastEagleDrafter"]):
        raise CheckpointError(f"{folder}: architectures is {kind}; expected a drafter trained here")
    sizes = Sizes(**{field.name: config[field.name] for field in fields(Sizes)})
    if kind == ["FastEagleDrafter"]:
        aux = tuple(config["aux_layer_ids"])
        return FastEagle(teacher, sizes, config["num_hidden_layers"], aux, ids_V), tensors
    aux = tuple(config["eagle_config"]["eagle_aux_hidden_state_layer_ids"])
    own = "lm_head.weight" in tensors
    return Eagle3(teacher, sizes, levels or OPTIONS["eagle3"]["levels"], aux, ids_V, own), tensors
