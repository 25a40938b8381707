"""Cross-entropy under an output matrix of many rows, without ever holding all logits.

The gradient is taken chunk by chunk on the way forward, so the logits of a chunk are dropped at once. On a CPU that is
several times as fast as ``cross_entropy(linear(...))``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

# R rows (a context and a level), H hidden size, V rows of the output matrix, P places

# Rows whose logits are held at a time: on a CPU they should stay in its cache.
_CHUNK = {"cpu": 128, "cuda": 8192}
# The scale s of the error in a score softmax(z / s), about the best one measured (docs/sampling.md).
SHARPNESS = 0.8


class RowTargets(Protocol):
    """The targets of rows."""

    def against(self, logits_RV: Tensor, rows_R: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of each row, [R], and its gradient with respect to the logits, [R, V]; ``rows_R`` names the rows."""
        ...


@dataclass(frozen=True, slots=True)
class WrittenToken:
    """The token that the teacher wrote, int64 [R]: plain cross-entropy (Medusa-1)."""

    token_R: Tensor

    def against(self, logits_RV: Tensor, rows_R: Tensor) -> tuple[Tensor, Tensor]:
        share_RV = logits_RV.softmax(-1)
        true_R1 = self.token_R[rows_R, None]
        hit_R1 = share_RV.gather(1, true_R1)
        share_RV.scatter_(1, true_R1, hit_R1 - 1)
        return -hit_R1[:, 0].float().clamp(min=1e-30).log(), share_RV


@dataclass(frozen=True, slots=True)
class Distribution:
    """The teacher's distribution over the draft vocabulary (EAGLE-3; Li et al., 2025)."""

    # The teacher's final states of a batch, [P, H], the draft vocabulary's rows of its output matrix [V, H], and which
    # state each row is up to, [R].
    last_PH: Tensor
    output_VH: Tensor
    place_R: Tensor

    def teacher(self, rows_R: Tensor) -> tuple[Tensor, Tensor]:
        """The teacher's logits, [U, V], and which of them a row is up to, [R].

        Several levels are up to one state; its logits are computed once.
        """
        place_U, which_R = self.place_R[rows_R].unique_consecutive(return_inverse=True)
        return F.linear(self.last_PH[place_U], self.output_VH), which_R

    def against(self, logits_RV: Tensor, rows_R: Tensor) -> tuple[Tensor, Tensor]:
        teacher_UV, which_R = self.teacher(rows_R)
        wanted_RV = teacher_UV.softmax(-1)[which_R]
        share_RV = logits_RV.softmax(-1)
        # log of the softmax's sum, from the greatest logit and its share.
        log_sum_R = logits_RV.max(-1).values.float() - share_RV.max(-1).values.float().log()
        loss_R = log_sum_R - (wanted_RV * logits_RV).sum(-1, dtype=torch.float32)
        return loss_R, share_RV.sub_(wanted_RV)


@dataclass(frozen=True, slots=True)
class Drawn:
    """The teacher's draws at a temperature, with noise that the drafter shares; its distribution if it is greedy.

    Each row has its own noise, new at every look: the order under any noise is learnt (docs/sampling.md).
    """

    distribution: Distribution
    # Of each row, float32 [R]; 0 if it is greedy.
    temperature_R: Tensor
    # Standard Gumbel numbers, float32 [L], more than V of them. Each row takes V consecutive ones from its own place.
    gumbel_L: Tensor
    generator: torch.Generator

    def against(self, logits_RV: Tensor, rows_R: Tensor) -> tuple[Tensor, Tensor]:
        sampled_R = self.temperature_R[rows_R] > 0
        if not sampled_R.any():
            return self.distribution.against(logits_RV, rows_R)
        if sampled_R.all():
            return self._drawn(logits_RV, rows_R)
        loss_R, slope_RV = torch.zeros(len(rows_R), device=logits_RV.device), torch.empty_like(logits_RV)
        for chosen_R, target in ((sampled_R, self._drawn), (~sampled_R, self.distribution.against)):
            loss_R[chosen_R], slope_RV[chosen_R] = target(logits_RV[chosen_R], rows_R[chosen_R])
        return loss_R, slope_RV

    def _drawn(self, logits_RV: Tensor, rows_R: Tensor) -> tuple[Tensor, Tensor]:
        teacher_UV, which_R = self.distribution.teacher(rows_R)
        noise_RV = self.temperature_R[rows_R, None] * self._gumbel(*logits_RV.shape)
        drawn_R1 = (noise_RV + teacher_UV[which_R]).max(-1, keepdim=True).indices
        share_RV = ((noise_RV + logits_RV) / SHARPNESS).softmax(-1)
        hit_R1 = share_RV.gather(1, drawn_R1)
        # Times s, so that a slope is as steep as that of greedy text.
        loss_R = -SHARPNESS * hit_R1[:, 0].clamp(min=1e-30).log()
        return loss_R, share_RV.scatter_(1, drawn_R1, hit_R1 - 1).to(logits_RV.dtype)

    def _gumbel(self, rows: int, vocabulary: int) -> Tensor:
        places = len(self.gumbel_L) - vocabulary
        at_R = torch.randint(places, (rows,), generator=self.generator, device=self.gumbel_L.device)
        return self.gumbel_L.unfold(0, vocabulary, 1)[at_R]


def drawn(distribution: Distribution, temperature_R: Tensor, vocabulary: int, seed: int) -> Drawn:
    """``Drawn`` with noise of a seed, for V ids."""
    generator = torch.Generator(temperature_R.device).manual_seed(seed)
    gumbel_L = -torch.empty(64 * vocabulary, device=temperature_R.device).exponential_(generator=generator).log()
    return Drawn(distribution, temperature_R, gumbel_L, generator)


class HeadLoss(torch.autograd.Function):
    """``apply(features_RH, output_VH, weight_R, target, order_R)``: the weighted sum of the rows' losses, and each.

    ``order_R`` is the order in which rows are taken. Gradients reach the features, and the output matrix if it is
    trained; the single losses, float32 [R], carry none.
    """

    @staticmethod
    def forward(
        ctx: Any, features_RH: Tensor, output_VH: Tensor, weight_R: Tensor, target: RowTargets, order_R: Tensor
    ) -> tuple[Tensor, Tensor]:
        loss_R = torch.zeros(len(weight_R), device=weight_R.device)
        gradient_RH = torch.empty_like(features_RH)
        gradient_VH = torch.zeros_like(output_VH, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for rows in order_R.split(_CHUNK[features_RH.device.type]):
            part_RH = features_RH[rows]
            loss_R[rows], slope_RV = target.against(F.linear(part_RH, output_VH), rows)
            weight_R1 = weight_R[rows, None].to(slope_RV.dtype)
            gradient_RH[rows] = (slope_RV @ output_VH) * weight_R1
            if gradient_VH is not None:
                gradient_VH += slope_RV.T @ (part_RH * weight_R1)
        ctx.save_for_backward(gradient_RH, gradient_VH)
        ctx.mark_non_differentiable(loss_R)
        return (loss_R * weight_R).sum(), loss_R

    @staticmethod
    def backward(ctx: Any, outer: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        gradient_RH, gradient_VH = ctx.saved_tensors
        scaled_VH = None if gradient_VH is None else gradient_VH.to(gradient_RH.dtype) * outer
        return gradient_RH * outer, scaled_VH, None, None, None
