"""A drafter in training: a frozen teacher, levels, a loss, and the ranks of true tokens.

A student turns a batch into one feature per context and level. An output matrix (the teacher's, or rows of it) turns
features into logits. Level i (0-based) predicts the token i + 2 places after the context's slot. Everything is computed
along the teacher's own text, as draft trees that hold the true path would compute it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftwood.compiler.checkpoints.safetensors_file import write_tensors
from draftwood.compiler.training.batch import NONE, Batch
from draftwood.compiler.training.losses import Distribution, HeadLoss, RowTargets, WrittenToken, drawn
from draftwood.compiler.training.precision import autocast, compute_dtype

if TYPE_CHECKING:
    from draftwood.compiler.training.teacher import FrozenTeacher

# N contexts, I levels, H hidden size, V draft vocabulary, T teacher's vocabulary, K candidates, R rows

# Rows whose logits are ranked at a time.
_RANKED = 256

# The numbers added to the logits for a level and some contexts, float32 [N, V], on the logits' device.
LevelNoise = Callable[[int, slice], Tensor]


class Student(nn.Module):
    """A drafter that learns from a frozen teacher.

    Tensors that it shares with the teacher are held in the type of matrix products, and frozen.
    """

    # In a step the cross-entropy looks at the ids of its texts and so many others; None for the whole vocabulary.
    negatives: int | None = None
    # On sampled text the cross-entropy is with the teacher's draw under noise that the drafter shares.
    shared_noise = False
    # The number of the training's step.
    step = 0
    # Weight of level i's loss is this to the power i: the choice of both Medusa-1 and EAGLE-3.
    DECAY = 0.8

    # The teacher's embedding; the teacher's ids that can be proposed (None for all), and their rows of its output
    # matrix.
    embedding_TH: Tensor
    ids_V: Tensor | None
    output_VH: Tensor

    def __init__(self, teacher: FrozenTeacher, levels: int, aux: tuple[int, ...], ids_V: Tensor | None) -> None:
        super().__init__()
        self.levels, self.aux, dtype = levels, aux, compute_dtype(teacher.device)
        self.positions = teacher.config.max_positions
        self.register_buffer("embedding_TH", teacher.embedding_VH.to(dtype), persistent=False)
        self.register_buffer("ids_V", None if ids_V is None else ids_V.to(teacher.device), persistent=False)
        output_VH = teacher.output_VH if ids_V is None else teacher.output_VH[ids_V]
        self.register_buffer("output_VH", output_VH.to(dtype), persistent=False)

    def start_from(self, teacher: FrozenTeacher) -> None:
        """Sets the trained parts to their beginning, from the teacher's own weights if they serve."""
        raise NotImplementedError

    def shape(self) -> dict[str, Any]:
        """The options of a training that begins a student as large."""
        return {"levels": self.levels}

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Goes on from a trained drafter's values, as ``DraftModel.trained`` reads them; parameters that it lacks stay
        as they began."""
        for name, parameter in self.named_parameters():
            if name in tensors:
                parameter.data.copy_(tensors[name])

    def features(self, batch: Batch) -> Tensor:
        """The input of ``logits`` for each context and level, [N, I, H]."""
        raise NotImplementedError

    def output(self, level: int) -> Tensor:
        """The output matrix of a level, [V, H]."""
        return self.output_VH

    def losses(self, batch: Batch, features_NIH: Tensor, weight_NI: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The weighted loss, and for the log each part of it summed by level, float32 [I], unweighted.

        ``weight_NI`` is 0 if there is nothing to predict.
        """
        raise NotImplementedError

    def save(self, folder: Path) -> None:
        """Writes the drafter in its published layout, in bfloat16."""
        raise NotImplementedError

    def loss(self, batch: Batch, count_I: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """``losses`` with weights DECAY^i / count; ``count_I`` are the contexts a level has in all processes."""
        there_NI = batch.targets(self.levels) != NONE
        decay_I = self.DECAY ** torch.arange(self.levels, device=there_NI.device)
        with autocast(there_NI.device):
            features_NIH = self.features(batch)
        return self.losses(batch, features_NIH, there_NI * (decay_I / count_I.clamp(min=1)))

    def distribution_loss(self, batch: Batch, features_NIH: Tensor, weight_NI: Tensor) -> tuple[Tensor, Tensor]:
        """Cross-entropy with the teacher's distribution, weighted; and summed by level, [I].

        If the teacher wrote a token that the drafter cannot propose there is nothing to learn. On greedy text this is
        EAGLE-3's rule, which asks for the teacher's best token. On sampled text a place counts by the share of the
        teacher's distribution that can be proposed.
        """
        if self.ids_V is not None:
            weight_NI = weight_NI * torch.isin(batch.targets(self.levels), self.ids_V)
        rows_R = weight_NI.flatten().nonzero()[:, 0]
        place_R = batch.places(self.levels).flatten()[rows_R]
        last_PH = batch.last_BSH.flatten(0, 1).to(self.output_VH.dtype)
        teacher_VH, output_VH = self.output_VH, self.output(0).to(self.output_VH.dtype)
        if self.negatives is not None:
            ids = self._columns(batch)
            teacher_VH, output_VH = teacher_VH[ids], output_VH[ids]
        distribution = Distribution(last_PH, teacher_VH, place_R)
        target: RowTargets = distribution
        if self.shared_noise:
            temperature_R = batch.temperatures().repeat_interleave(self.levels)[rows_R]
            target = drawn(distribution, temperature_R, len(output_VH), self._seed(batch))
        loss, loss_R = HeadLoss.apply(
            features_NIH.flatten(0, 1)[rows_R].to(output_VH.dtype), output_VH, weight_NI.flatten()[rows_R], target,
            place_R.argsort(stable=True),
        )  # fmt: skip
        return loss, _by_level(loss_R, rows_R, self.levels)

    def _columns(self, batch: Batch) -> Tensor:
        """The ids whose logits a step looks at, ascending: those of its texts, and ``negatives`` others at random."""
        written, random = batch.ids_BS.unique(), torch.Generator().manual_seed(self._seed(batch))
        others = torch.randint(len(self.output_VH), (self.negatives or 0,), generator=random)
        return torch.cat((written, others.to(written.device))).unique()

    def _seed(self, batch: Batch) -> int:
        """Of what is random in a step: a run that resumes is the same, and a batch that comes again has other noise."""
        return (self.step << 40) + int(batch.ids_BS.sum())

    def token_loss(self, batch: Batch, features_NIH: Tensor, weight_NI: Tensor) -> tuple[Tensor, Tensor]:
        """Cross-entropy with the tokens that the teacher wrote, weighted; and summed by level, [I]."""
        targets_NI = batch.targets(self.levels)
        sums: list[Tensor] = []
        total = torch.zeros((), device=targets_NI.device)
        for level in range(self.levels):
            rows_R = weight_NI[:, level].nonzero()[:, 0]
            output_VH = self.output(level).to(self.output_VH.dtype)
            loss, loss_R = HeadLoss.apply(
                features_NIH[rows_R, level].to(output_VH.dtype), output_VH, weight_NI[rows_R, level],
                WrittenToken(targets_NI[rows_R, level]), torch.arange(len(rows_R), device=rows_R.device),
            )  # fmt: skip
            total, sums = total + loss, [*sums, loss_R.sum()]
        return total, torch.stack(sums)

    @torch.no_grad()
    def frozen(self, batch: Batch) -> Tensor:
        """``features`` without a gradient, as the output matrix takes them."""
        with autocast(batch.ids_BS.device):
            return self.features(batch).to(self.output_VH.dtype)

    @torch.no_grad()
    def ranks(self, batch: Batch, candidates: int, features_NIH: Tensor, noise: LevelNoise | None = None) -> Tensor:
        """Rank of the true token among each level's candidates, int64 [N, I]; ``candidates`` if it is not there.

        ``features_NIH`` are the batch's, from ``frozen``; ``noise`` is added to the logits.
        """
        targets_NI = batch.targets(self.levels)
        ranks = []
        for level in range(self.levels):
            hit_NK = torch.cat([
                self.best(self.logits(features_NIH[part, level], level, noise and noise(level, part)), candidates)
                for part in _parts(len(features_NIH))
            ]) == targets_NI[:, level, None]  # fmt: skip
            ranks.append(torch.where(hit_NK.any(-1), hit_NK.int().argmax(-1), candidates))
        return torch.stack(ranks, 1)

    def logits(self, features_NH: Tensor, level: int, noise_NV: Tensor | None = None) -> Tensor:
        """A level's ranking, float32 [N, V], from ``frozen`` features; minus infinity for tokens that it cannot
        propose."""
        logits_NV = F.linear(features_NH, self.output(level).to(self.output_VH.dtype)).float()
        return logits_NV if noise_NV is None else logits_NV + noise_NV

    def best(self, logits_NV: Tensor, candidates: int) -> Tensor:
        """The teacher's ids of the best candidates, best first, int64 [N, K]."""
        top_NK = logits_NV.topk(min(candidates, logits_NV.shape[-1])).indices
        return top_NK if self.ids_V is None else self.ids_V[top_NK]

    def maps(self) -> dict[str, Tensor]:
        """d2t int64 [V], the offsets from draft ids to the teacher's, and t2d bool [T]; nothing without a subset."""
        if self.ids_V is None:
            return {}
        ids_V = self.ids_V.cpu()
        known_T = torch.zeros(len(self.embedding_TH), dtype=torch.bool)
        known_T[ids_V] = True
        return {"d2t": ids_V - torch.arange(len(ids_V)), "t2d": known_T}


def write_folder(
    folder: Path, tensors: dict[str, Any], config: dict[str, Any], file: str = "model.safetensors"
) -> None:
    """A drafter's weights, in bfloat16, and its config.json; id maps keep their types."""
    moved = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    stored = {name: t.to(torch.bfloat16) if t.is_floating_point() else t for name, t in moved.items()}
    write_tensors(folder / file, stored)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _parts(contexts: int) -> Iterator[slice]:
    return (slice(at, min(at + _RANKED, contexts)) for at in range(0, contexts, _RANKED))


def _by_level(loss_R: Tensor, rows_R: Tensor, levels: int) -> Tensor:
    return torch.zeros(levels, device=loss_R.device).index_add_(0, rows_R % levels, loss_R)
