"""Medusa heads in training: their start, their loss, and the ranks that true tokens have among their candidates."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from draftwood.compiler.medusa import MedusaHeads
from draftwood.compiler.medusa_checkpoint import MedusaCheckpoint
from draftwood.tools.training.contexts import NONE, Contexts

# N contexts, R rows (a context and a head), I heads, H hidden size, V vocabulary

# Weight of head i is this to the power i (the paper's choice).
HEAD_WEIGHT = 0.8
# Rows whose logits are held at a time: on a CPU they should stay in its cache.
_CHUNK = {"cpu": 128, "cuda": 8192}


class TiedCrossEntropy(torch.autograd.Function):
    """Weighted cross-entropy under a frozen output matrix, with the gradient taken on the way.

    The matrix needs no gradient, so the logits of a chunk can be dropped at once; that is four times as fast on
    a CPU as ``cross_entropy(linear(...))``.
    """

    @staticmethod
    def forward(ctx, features_RH: Tensor, output_VH: Tensor, target_R: Tensor, weight_R: Tensor) -> tuple:
        """Returns the weighted sum of the losses, and the losses float32 [R] (without gradient)."""
        loss_R = torch.empty(len(target_R), device=target_R.device)
        gradient_RH = torch.empty_like(features_RH)
        size = _CHUNK[features_RH.device.type]
        for rows in (slice(at, at + size) for at in range(0, len(target_R), size)):
            share_RV = F.linear(features_RH[rows], output_VH).softmax(-1)
            true_R1 = target_R[rows, None]
            hit_R1 = share_RV.gather(1, true_R1)
            loss_R[rows] = -hit_R1[:, 0].float().clamp(min=1e-30).log()
            share_RV.scatter_(1, true_R1, hit_R1 - 1)
            gradient_RH[rows] = (share_RV @ output_VH) * weight_R[rows, None]
        ctx.save_for_backward(gradient_RH)
        ctx.mark_non_differentiable(loss_R)
        return (loss_R * weight_R).sum(), loss_R

    @staticmethod
    def backward(ctx, outer: Tensor, _: Tensor) -> tuple:
        return ctx.saved_tensors[0] * outer, None, None, None


def start_heads(output_VH: Tensor, heads: int, blocks: int, own_output: bool) -> MedusaHeads:
    """Heads that begin as the teacher's own head: blocks of zeros, output matrices copied from ``output_VH``."""
    model = MedusaHeads(output_VH.shape[1], len(output_VH), heads, blocks, tied=not own_output)
    for head in model.heads:
        for block in head.blocks:
            torch.nn.init.zeros_(block.weight)
            torch.nn.init.zeros_(block.bias)
        if own_output:
            head.out.weight.data.copy_(output_VH)
    return model.to(output_VH.device)


def loss_of(heads: MedusaHeads, hidden_NH: Tensor, targets_NI: Tensor, output_VH: Tensor) -> tuple[Tensor, Tensor]:
    """The loss, and the mean cross-entropy of each head, float32 [I] (NaN for a head without a target)."""
    losses, features, targets, weights = [], [], [], []
    for i, head in enumerate(heads.heads):
        there = (targets_NI[:, i] != NONE).nonzero()[:, 0]
        targets.append(targets_NI[there, i])
        weights.append(torch.full((len(there),), HEAD_WEIGHT**i / max(1, len(there)), device=there.device))
        with torch.autocast(hidden_NH.device.type, dtype=torch.bfloat16):
            features.append(head.features(hidden_NH[there]))
            if not heads.tied:
                losses.append(F.cross_entropy(head.out(features[-1]).float(), targets[-1], reduction="none"))
    if heads.tied:
        all_features = torch.cat(features).to(output_VH.dtype)
        loss, loss_R = TiedCrossEntropy.apply(all_features, output_VH, torch.cat(targets), torch.cat(weights))
        losses = list(loss_R.split([len(part) for part in targets]))
    else:
        loss = sum((part * weight).sum() for part, weight in zip(losses, weights, strict=True))
    return loss, torch.stack([part.detach().mean() for part in losses])


@torch.no_grad()
def ranked(heads: MedusaHeads, hidden_NH: Tensor, output_VH: Tensor, candidates: int) -> Iterator[Tensor]:
    """Candidate tokens of every head, best first, int64 [n, I, candidates], for a few contexts at a time."""
    for part_NH in hidden_NH.split(256):
        part_NH = part_NH.to(output_VH.device)
        with torch.autocast(output_VH.device.type, dtype=torch.bfloat16):
            logits = [
                F.linear(head.features(part_NH), output_VH if heads.tied else head.out.weight) for head in heads.heads
            ]
        yield torch.stack([part.float().topk(candidates).indices for part in logits], 1).cpu()


def ranks_of(heads: MedusaHeads, hidden_NH: Tensor, targets_NI: Tensor, output_VH: Tensor, candidates: int) -> Tensor:
    """Rank of each target among its head's candidates, int64 [N, I]; ``candidates`` where it is not among them."""
    tokens_NIK = torch.cat(list(ranked(heads, hidden_NH, output_VH, candidates)))
    hit_NIK = tokens_NIK == targets_NI[:, :, None]
    return torch.where(hit_NIK.any(-1), hit_NIK.int().argmax(-1), candidates)


def accuracy(
    heads: MedusaHeads, contexts: Contexts, greedy_N: np.ndarray, output_VH: Tensor, limit: int | None = None
) -> dict[str, dict[str, list[float]]]:
    """Per head the share of targets that are its first, and among its first five; greedy and sampled texts apart."""
    result = {}
    ranks_NI = ranks_of(heads, contexts.hidden_NH[:limit], contexts.targets_NI[:limit], output_VH, 5)
    there_NI = contexts.targets_NI[:limit] != NONE
    for name, kind in (("greedy", greedy_N), ("sampled", ~greedy_N)):
        kind_N = torch.from_numpy(kind[:limit])
        count_I = there_NI[kind_N].sum(0).clamp(min=1)
        result[name] = {
            f"top{k}": [round(s, 4) for s in ((ranks_NI < k) & there_NI)[kind_N].sum(0).div(count_I).tolist()]
            for k in (1, 5)
        }
    return result


def save_heads(heads: MedusaHeads, folder: Path, blocks: int, teacher: str) -> None:
    """Writes medusa_lm_head.safetensors in bfloat16, in the published layout, and config.json."""
    tensors = {}
    for i, head in enumerate(heads.heads):
        for j, block in enumerate(head.blocks):
            tensors[f"{i}.{j}.linear.weight"], tensors[f"{i}.{j}.linear.bias"] = block.weight, block.bias
        if not heads.tied:
            tensors[f"{i}.{blocks}.weight"] = head.out.weight
    stored = {key: value.detach().to("cpu", torch.bfloat16).contiguous() for key, value in tensors.items()}
    save_file(stored, folder / "medusa_lm_head.safetensors", metadata={"format": "pt"})
    config = {"medusa_num_heads": len(heads.heads), "medusa_num_layers": blocks, "base_model_name_or_path": teacher}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def load_heads(checkpoint: MedusaCheckpoint, output_VH: Tensor) -> MedusaHeads:
    """The heads of a checkpoint in float32, where ``output_VH`` lies, frozen."""
    heads = MedusaHeads(output_VH.shape[1], len(output_VH), checkpoint.heads, checkpoint.blocks, checkpoint.tied)
    heads.load_state_dict({name: checkpoint.weight(name).float() for name in checkpoint.names()})
    return heads.to(output_VH.device).requires_grad_(False)
