"""Batched generation by a frozen teacher: caches written in place, greedy and sampled rows side by side.

Finished rows are dropped on the way, so that the longest text of a batch does not cost what all cost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from draftwood.compiler.training.teacher import FrozenTeacher, TextCaches
from draftwood.runtime.speculation.sampling import Sampling, draw

# B rows, P prompt columns, C all columns, T fed columns, V vocabulary

# Finished rows are dropped once they are this share of the batch: dropping copies the cache.
_DROP_SHARE = 0.2


def generate(
    teacher: FrozenTeacher,
    prompts: Sequence[Sequence[int]],
    samplings: Sequence[Sampling],
    new: int,
    ends: Sequence[int],
    told: Callable[[int], None] = lambda tokens: None,
) -> list[list[int]]:
    """Continues every prompt by up to ``new`` tokens; a text ends behind its first end token, which it keeps.

    Tokens are drawn as an engine draws them: by logits, seed and position, whatever other rows do.

    Args:
        prompts: B prompts of one or more token ids; similar lengths save padding.
        samplings: one a prompt.
        told: called after every step with how many tokens it wrote.
    """
    rows = _Rows(teacher, prompts, samplings, new)
    texts: list[list[int]] = [[] for _ in prompts]
    ends_ = torch.tensor(ends, dtype=torch.int64)
    open_B = torch.ones(len(prompts), dtype=torch.bool)
    for _ in range(new):
        drawn_B = rows.step(teacher)
        for row in open_B.nonzero()[:, 0].tolist():
            texts[rows.names[row]].append(int(drawn_B[row]))
        told(int(open_B.sum()))
        open_B &= ~torch.isin(drawn_B, ends_)
        if not open_B.any():
            break
        if int((~open_B).sum()) >= max(1, _DROP_SHARE * len(open_B)):
            rows.keep(open_B.nonzero()[:, 0])
            open_B = open_B[open_B]
    return texts


class _Rows:
    """The rows still being written: caches, left-padded mask, positions, and the tokens to feed next."""

    def __init__(
        self, teacher: FrozenTeacher, prompts: Sequence[Sequence[int]], samplings: Sequence[Sampling], new: int
    ) -> None:
        count, longest = len(prompts), max(map(len, prompts))
        feed_BP = torch.zeros(count, longest, dtype=torch.int64)
        seen_BC = torch.zeros(count, longest + new, dtype=torch.bool)
        for row, prompt in enumerate(prompts):
            feed_BP[row, longest - len(prompt) :] = torch.tensor(prompt)
            seen_BC[row, longest - len(prompt) :] = True
        self.padded = not bool(seen_BC.all())  # without a mask attention takes a faster path
        self.names = list(range(count))
        self.feed_BT, self.seen_BC = feed_BP.to(teacher.device), seen_BC.to(teacher.device)
        self.positions_BT = (self.seen_BC[:, :longest].cumsum(1) - 1).clamp(min=0)
        self.samplings = list(samplings)
        self.caches = TextCaches(teacher, count, longest + new)

    def step(self, teacher: FrozenTeacher) -> Tensor:
        """Feeds what is pending and draws the next token of every row, int64 [B] on the host."""
        written = self.caches.length + self.feed_BT.shape[1]
        seen_BC = self.seen_BC[:, :written] if self.padded else None
        logits_BV = teacher.step(self.feed_BT, self.positions_BT, self.caches, seen_BC)
        self.positions_BT = self.positions_BT[:, -1:] + 1
        drawn_B = draws(logits_BV, self.samplings, self.positions_BT[:, 0].tolist())
        self.feed_BT = drawn_B[:, None].to(teacher.device)
        return drawn_B

    def keep(self, rows: Tensor) -> None:
        """Drops all rows but these."""
        self.names = [self.names[row] for row in rows.tolist()]
        self.samplings = [self.samplings[row] for row in rows.tolist()]
        rows = rows.to(self.feed_BT.device)
        for name in ("feed_BT", "seen_BC", "positions_BT"):
            setattr(self, name, getattr(self, name)[rows])
        self.caches.keep(rows)


def draws(logits_BV: Tensor, samplings: Sequence[Sampling], positions: Sequence[int]) -> Tensor:
    """One token a row for its absolute position, int64 [B] on the host."""
    tokens_B = logits_BV.max(-1).indices.cpu()  # several times faster than argmax on a CPU
    for row, (sampling, position) in enumerate(zip(samplings, positions, strict=True)):
        if not sampling.greedy:
            tokens_B[row] = draw(logits_BV[row].float().cpu().numpy(), sampling, position)
    return tokens_B
