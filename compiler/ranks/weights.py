"""The weights of one rank: those of the whole model, cut as the plan says when each is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from draftwood.compiler.checkpoints.weight import WeightEntry
from draftwood.compiler.ranks.plan import TOKENS, cut, layer_of, split_of
from draftwood.compiler.ranks.share import Share
from draftwood.compiler.teachers.config import TeacherConfig
from draftwood.compiler.teachers.registry import family_of


def rank_entries(
    entries: Sequence[WeightEntry], teacher: TeacherConfig, block: TeacherConfig, share: Share
) -> list[WeightEntry]:
    """A rank's weights, in the order of ``entries``; ``block`` has the sizes of a drafter's blocks.

    One whole tensor is in memory at a time. Next to the rows of an embedding stands the first token that they are of.
    """
    cut: list[WeightEntry] = []
    names = family_of(teacher).parts(teacher).keys()
    for entry in entries:
        layer, _ = layer_of(entry.name)
        split = split_of(layer)
        if split is None or share.ranks == 1:
            cut.append(entry)
            continue
        cut.append(_cut(entry, teacher if entry.name in names else block, share))
        if split is TOKENS:
            first = torch.tensor([share.of(entry.shape[0])[0]])
            cut.append(WeightEntry(f"{layer}.start", (1,), first.clone, dtype=torch.int64))
    return cut


def _cut(entry: WeightEntry, block: TeacherConfig, share: Share) -> WeightEntry:
    def read() -> Tensor:
        return cut(entry.name, entry.read(), block, share).clone()

    shape = tuple(cut(entry.name, torch.empty(entry.shape, device="meta"), block, share).shape)
    return replace(entry, shape=shape, read=read, parts=())
