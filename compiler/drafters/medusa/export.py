"""Medusa heads in the layout that vLLM reads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from draftwood.compiler.drafters.common.export import dtype_name, layout_named
from draftwood.compiler.drafters.medusa.checkpoint import MedusaCheckpoint
from draftwood.compiler.drafters.medusa.layouts import TOKEN_MAP
from draftwood.compiler.drafters.model import Folder
from draftwood.compiler.teachers.checkpoint import Checkpoint


def exported(opened: MedusaCheckpoint, teacher: Checkpoint, layout: str, verifier: str) -> Folder:
    """The heads in a layout; ``verifier`` is what the teacher is called.

    Raises:
        RequestError: the layout is not known, or has no form of what the heads have.
    """
    return layout_named({"vllm": _vllm}, layout, "Medusa")(opened, teacher, verifier)


def _vllm(opened: MedusaCheckpoint, teacher: Checkpoint, verifier: str) -> Folder:
    config, vocabulary = opened.config, teacher.config.vocabulary
    fields: dict[str, Any] = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": teacher.config.hidden,
        "vocab_size": vocabulary,
        "truncated_vocab_size": vocabulary if opened.ids is None else len(opened.ids),
        "num_heads": config.heads,
        "num_hidden_layers": config.blocks,
        "medusa_fc_bias": config.bias,
        "original_lm_head": config.tied,
        "base_model_name_or_path": verifier,
        "torch_dtype": dtype_name(opened.dtype),
    }
    tensors: dict[str, Tensor] = {} if opened.ids is None else {TOKEN_MAP: opened.ids.clone()}
    for i in range(config.heads):
        for j, kind, tensor in _blocks(opened, i):
            tensors[f"blocks.{i}.layers.{j}.{kind}"] = tensor
        tensors["lm_head.weight" if config.tied else f"lm_heads.{i}.weight"] = _output(opened, teacher, i)
    return Folder(fields, tensors)


def _blocks(opened: MedusaCheckpoint, head: int) -> Iterator[tuple[int, str, Tensor]]:
    for j in range(opened.config.blocks):
        for kind in ("weight", "bias") if opened.config.bias else ("weight",):
            yield j, kind, opened.weight(f"heads.{head}.blocks.{j}.{kind}").contiguous()


def _output(opened: MedusaCheckpoint, teacher: Checkpoint, head: int) -> Tensor:
    """[V, H], the head's own, or a copy of the teacher's, which tied heads use."""
    if not opened.config.tied:
        return opened.weight(f"heads.{head}.out.weight").contiguous()
    found = teacher.matrix("embed.weight" if teacher.config.tied else "lm_head.weight")
    return found.to(opened.dtype).clone(memory_format=torch.contiguous_format)
