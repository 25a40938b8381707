"""Batched generation by a frozen teacher: caches written in place, greedy and sampled rows side by side.

Finished rows are dropped on the way, so that the longest text of a batch does not cost as much as all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from draftwood.compiler.training.teacher import FrozenTeacher, TextCaches
from draftwood.runtime.speculation.sampling import Sampling, draw

# B rows, P prompt columns, C all columns, T fed columns, V vocabulary, A width of the states

# Finished rows are dropped once they are this share of the batch: dropping copies the cache.
_DROP_SHARE = 0.2

# Tokens that are fed at a time.
_FED = {"cpu": 2048, "cuda": 1 << 17}

# One token a row, int64 [B]: of the logits [B, V], the numbers of the texts that the rows are of, and positions [B].
Draws = Callable[[Tensor, Sequence[int], Tensor], Tensor]
# Takes the texts' numbers and the teacher's states of the tokens that were fed, [B, T, A]. Of a prompt that is shorter
# than the others only the last columns count.
Keep = Callable[[Sequence[int], Tensor], None]


def generate(
    teacher: FrozenTeacher,
    prompts: Sequence[Sequence[int]],
    draws: Draws,
    new: int,
    ends: Sequence[int],
    told: Callable[[int], None] = lambda tokens: None,
    keep: Keep | None = None,
    layers: Sequence[int] = (),
) -> list[list[int]]:
    """Continues every prompt by up to ``new`` tokens; a text ends after its first end token, which it keeps.

    Args:
        prompts: B prompts of one or more token ids; similar lengths save padding.
        told: called after every step with how many tokens it wrote.
        keep: called after every step with the states of the fed tokens: final ones, then those that enter ``layers``.
    """
    rows = _Rows(teacher, prompts, new, keep, layers)
    texts: list[list[int]] = [[] for _ in prompts]
    ends_ = torch.tensor(ends, dtype=torch.int64)
    open_B = torch.ones(len(prompts), dtype=torch.bool)
    for _ in range(new):
        drawn_B = rows.step(teacher, draws)
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
        self, teacher: FrozenTeacher, prompts: Sequence[Sequence[int]], new: int, keep: Keep | None,
        layers: Sequence[int],
    ) -> None:  # fmt: skip
        self.keep_states, self.layers = keep, layers
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
        self.caches = TextCaches(teacher, count, longest + new)

    def step(self, teacher: FrozenTeacher, draws: Draws) -> Tensor:
        """Feeds the pending tokens and draws the next token of every row, int64 [B] on the host."""
        logits_BV = torch.cat([self._fed(teacher, part) for part in self._parts()])
        self.caches.length += self.feed_BT.shape[1]
        self.positions_BT = self.positions_BT[:, -1:] + 1
        drawn_B = draws(logits_BV, self.names, self.positions_BT[:, 0])
        self.feed_BT = drawn_B[:, None]
        return drawn_B.cpu()

    def _parts(self) -> Iterator[slice]:
        """Texts that are fed together: of prompts so few that their states stay in a cache, or in memory."""
        texts = max(1, _FED[self.feed_BT.device.type] // self.feed_BT.shape[1])
        return (slice(at, at + texts) for at in range(0, len(self.feed_BT), texts))

    def _fed(self, teacher: FrozenTeacher, part: slice) -> Tensor:
        """Feeds the pending tokens of some texts; their next logits, [texts, V]."""
        written = self.caches.length + self.feed_BT.shape[1]
        seen_BC = self.seen_BC[part, :written] if self.padded else None
        feed_BT, caches = self.feed_BT[part], self.caches.part(part)
        logits_BV, states_BTA = teacher.step(feed_BT, self.positions_BT[part], caches, seen_BC, self.layers)
        if self.keep_states is not None:
            self.keep_states(self.names[part], states_BTA)
        return logits_BV

    def keep(self, rows: Tensor) -> None:
        """Drops all rows but these."""
        self.names = [self.names[row] for row in rows.tolist()]
        rows = rows.to(self.feed_BT.device)
        for name in ("feed_BT", "seen_BC", "positions_BT"):
            setattr(self, name, getattr(self, name)[rows])
        self.caches.keep(rows)


def engine_draws(samplings: Sequence[Sampling]) -> Draws:
    """As an engine draws, one sampling a text: by logits, seed and position, independent of other texts."""

    def drawn(logits_BV: Tensor, texts: Sequence[int], position_B: Tensor) -> Tensor:
        tokens_B = logits_BV.max(-1).indices  # several times faster than argmax on a CPU
        for row, (text, position) in enumerate(zip(texts, position_B.tolist(), strict=True)):
            if not (sampling := samplings[text]).greedy:
                tokens_B[row] = draw(logits_BV[row].float().cpu().numpy(), sampling, position)
        return tokens_B

    return drawn


def batch_draws(temperatures: Sequence[float], seed: int, device: torch.device) -> Draws:
    """All texts at once, one temperature a text, from one stream of noise: in another batch a text is another."""
    generator = torch.Generator(device).manual_seed(seed)
    temperature_W = torch.tensor(temperatures, device=device)

    def drawn(logits_BV: Tensor, texts: Sequence[int], position_B: Tensor) -> Tensor:
        tokens_B, heat_B = logits_BV.max(-1).indices, temperature_W[torch.tensor(texts, device=device)]
        if bool((sampled_B := heat_B > 0).any()):
            # By the inverse of the cumulated shares: a number a row is drawn, not one a token of the vocabulary.
            share_RV = (logits_BV[sampled_B].float() / heat_B[sampled_B, None]).softmax(-1).cumsum(-1)
            uniform_R1 = torch.rand(len(share_RV), 1, generator=generator, device=device) * share_RV[:, -1:]
            tokens_B[sampled_B] = torch.searchsorted(share_RV, uniform_R1, right=True)[:, 0].clamp(
                max=share_RV.shape[1] - 1
            )
        return tokens_B

    return drawn
