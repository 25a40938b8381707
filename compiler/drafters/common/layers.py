"""Shared layers of networks with caches: a cache of the accepted text, and the ends of the network.

Slot j of a drafter's cache holds token j + 1 together with the teacher's states of token j. A draft step *extends* the
cache once, by the rows that the last verify step accepted. Rows of a draft tree are never written to it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from draftwood.compiler.drafters.common.config import CachedConfig
from draftwood.compiler.drafters.common.trees import Growth
from draftwood.compiler.teachers.block import Form, Layer, Norm, Placement, rotated_pair
from draftwood.compiler.teachers.config import TeacherConfig
from draftwood.compiler.teachers.decoder import TeacherEnds

# P rows that extend the cache, R rows of a tree level, S tree rows kept, N query heads, K key/value heads,
# G = N / K, D head dimension, C cache slots, H hidden, V vocabulary, U draft vocabulary


def cast_to(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in a dtype; x itself if it has it, for torch.export records an assertion for a cast that does nothing."""
    return x if x.dtype == dtype else x.to(dtype)


class Waiting(NamedTuple):
    """Text that the caches do not hold yet. ``tokens`` come one *after* the tokens of ``features``, so the last one
    that counts is the root. ``committed`` and ``accepted`` are the steps' inputs."""

    tokens_P: Tensor
    features_PF: Tensor
    committed_1: Tensor
    accepted_1: Tensor


class Extended(Protocol):
    """The result of an extend pass: the root's hidden states after the last norm [I, H], and the caches."""

    @property
    def normed(self) -> Tensor: ...

    @property
    def caches(self) -> list[Tensor]: ...


@dataclass(frozen=True)
class Extension(ABC):
    """An extend pass: P rows after the text. ``last`` [1] is the row of the last token that counts. ``unseen`` hides
    the slots after the text from a tree."""

    last_1: Tensor
    unseen_C: Tensor

    @abstractmethod
    def attend(self, layer: DraftLayer, x: Tensor, cache: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Writes the rows of one layer into its caches, key then value: (attended [P, N*D], both caches)."""

    @abstractmethod
    def write(self, layer: DraftLayer, x: Tensor, cache: list[Tensor]) -> list[Tensor]:
        """Writes the rows of one layer into its caches and attends to nothing."""


@dataclass(frozen=True)
class Scattered(Extension):
    """Over flat caches [K*C, D]: one write by index, then attention under a mask."""

    placement: Placement
    cos_P1D: Tensor
    sin_P1D: Tensor
    form: Form

    def attend(self, layer: DraftLayer, x: Tensor, cache: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        q_PND, *new = layer.rotated(x, self.cos_P1D, self.sin_P1D)
        written = self._scattered(new, cache)
        return layer.over_cache(q_PND, written, self.placement.masked, self.form), written

    def write(self, layer: DraftLayer, x: Tensor, cache: list[Tensor]) -> list[Tensor]:
        return self._scattered(layer.rotated(x, self.cos_P1D, self.sin_P1D)[1:], cache)

    def _scattered(self, new: Sequence[Tensor], cache: list[Tensor]) -> list[Tensor]:
        return [
            torch.ops.npu.npu_scatter_nd_update(old, self.placement.index, rows_PKD.flatten(0, 1))
            for old, rows_PKD in zip(cache, new, strict=True)
        ]


@dataclass(frozen=True)
class AppendedExtend(Extension):
    """An extend pass over a CPU's caches [1, K, C, D]: one operator writes the rows up to ``slot`` and attends. The
    operator has no window. With a window, ``masked`` [P, C] marks the slots that a row does not see."""

    cos_PE: Tensor
    sin_PE: Tensor
    slot_1: Tensor
    masked_PC: Tensor | None

    def attend(self, layer: DraftLayer, x: Tensor, cache: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        rows = layer.rotated_rows(x, self.cos_PE, self.sin_PE)
        if self.masked_PC is None:
            return self._appended(layer, rows, cache)
        q_PND = rows[0][0].unflatten(-1, (layer.config.heads, layer.config.head_dim))
        written = self._appended(layer, (torch.zeros_like(rows[0]), *rows[1:]), cache)[1]
        return layer.attend_tree(q_PND, written, self.masked_PC), written

    def write(self, layer: DraftLayer, x: Tensor, cache: list[Tensor]) -> list[Tensor]:
        # The operator always attends; with rows of zeros the result is not used.
        q_1PE, *rows = layer.rotated_rows(x, self.cos_PE, self.sin_PE)
        return self._appended(layer, (torch.zeros_like(q_1PE), *rows), cache)[1]

    def _appended(self, layer: DraftLayer, rows: Sequence[Tensor], cache: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        q, k, v = rows
        out, *written = layer.append_rows((q, k, v), cache, None, self.slot_1, self.slot_1.reshape(()) + 1)
        return out, written


class DraftLayer(Layer):
    """A decoder block over a cache of accepted text; ``width`` is that of its input, the hidden size by default."""

    def __init__(self, config: TeacherConfig, width: int | None = None) -> None:
        super().__init__(config)
        if width is not None:
            queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
            self.qkv = nn.Linear(width, queries + 2 * keys, bias=config.qkv_bias)

    def rotated(self, x: Tensor, cos_R1D: Tensor, sin_R1D: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [R, N, D], k and v [R, K, D] of rows x at the positions of the rotary factors."""
        q, k, v = (rows.unflatten(-1, (-1, self.config.head_dim)) for rows in self.project(x))
        q, k = (rows.squeeze(0) for rows in rotated_pair(q[None], k[None], cos_R1D[None], sin_R1D[None]))
        return q, k, v

    def attend_tree(
        self,
        q_RND: Tensor,
        cache: list[Tensor],
        unseen: Tensor,
        branch: tuple[Tensor, Tensor] | None = None,
        masked_RS: Tensor | None = None,
    ) -> Tensor:
        """Rows [R, N*D]: one softmax over the written cache and the rows' own K/V ``branch`` [K, S, D], if any.

        ``unseen`` [C] or [R, C] hides a part of the cache. The two parts are never joined, so the cache is not copied.
        Scores and softmax are fp32.
        """
        config = self.config
        query_KGRD = q_RND.transpose(0, 1).reshape(config.kv_heads, -1, config.head_dim)
        sides = [[c.view(config.kv_heads, -1, config.head_dim) for c in cache]]
        sides += [list(branch)] if branch else []
        grouped = (-1, q_RND.shape[0])
        scores = [(query_KGRD @ keys.transpose(-1, -2)).unflatten(1, grouped) for keys, _ in sides]
        # A row sees itself, in the branch or in the cache, so no row is masked altogether.
        scores[0] = scores[0].masked_fill(unseen, float("-inf"))
        if masked_RS is not None:
            scores[1] = scores[1].masked_fill(masked_RS, float("-inf"))
        scores_KGRX = cast_to(torch.cat(scores, -1) if branch else scores[0], torch.float32)
        weights_KGRX = torch.softmax(scores_KGRX * config.head_dim**-0.5, -1)
        weights = cast_to(weights_KGRX, q_RND.dtype).flatten(1, 2)
        shares = weights.split([part.shape[-1] for part in scores], -1) if branch else [weights]
        outs = [share @ values for share, (_, values) in zip(shares, sides, strict=True)]
        out_KGRD = outs[0] + outs[1] if branch else outs[0]
        return out_KGRD.unflatten(1, grouped).flatten(0, 1).transpose(0, 1).flatten(1)


class CachedNetwork(nn.Module):
    """Embedding, fc, last norm, output matrix, vocabulary map and rotary tables of a drafter.

    Parameter names differ from the teacher's, so that one bundle can hold both.
    """

    # Hidden states of the root that an extend pass leaves.
    root_states = 1

    def __init__(self, config: CachedConfig, positions: int) -> None:
        super().__init__()
        self.config, block = config, config.block
        if config.own_embedding:
            self.draft_embed = nn.Embedding(block.vocabulary, block.hidden)
        self.fc = nn.Linear(config.features, block.hidden, bias=False)
        self.draft_norm = Norm(block.hidden, block.rms_norm_eps)
        if config.has_head:
            self.draft_head = nn.Linear(block.hidden, config.draft_vocabulary, bias=False)
        self.teacher_ids: Tensor
        if config.mapped:
            self.register_buffer("teacher_ids", torch.zeros(config.draft_vocabulary, dtype=torch.int64))
        self.draft_cos: Tensor
        self.draft_sin: Tensor
        self.register_buffer("draft_cos", torch.empty(positions, block.head_dim))
        self.register_buffer("draft_sin", torch.empty(positions, block.head_dim))

    def extend(self, waiting: Waiting, caches: list[Tensor], teacher: TeacherEnds, form: Form = "fused") -> Extended:
        """Writes the waiting rows into the caches, key then value of every layer, and runs the last that counts.

        ``caches`` are flat [K*C, D], or with ``form`` "cpu" [1, K, C, D].
        """
        raise NotImplementedError

    def root(self, extended: Extended, teacher: TeacherEnds, noise_DU: Tensor) -> Growth:
        """The root of a tree of D levels, for drafters whose candidates depend on the nodes above them. ``noise`` has a
        row for every level: nodes of one depth have one position."""
        raise NotImplementedError

    def levels(self, extended: Extended, teacher: TeacherEnds) -> Tensor:
        """The hidden states that rank the tokens after the root [I, H], for drafters with one pass for all levels."""
        return extended.normed

    def embed(self, tokens_R: Tensor, teacher: TeacherEnds) -> Tensor:
        """[R, H] of the teacher's token ids."""
        if self.config.own_embedding:
            return self.draft_embed(tokens_R)
        return teacher.embedded(tokens_R)

    def logits(self, normed_RH: Tensor, teacher: TeacherEnds) -> Tensor:
        """Logits [R, U] of hidden states after the last norm."""
        return self.draft_head(normed_RH) if self.config.has_head else teacher.scores(normed_RH)

    def best(self, normed_RH: Tensor, teacher: TeacherEnds, k: int, noise_RU: Tensor) -> tuple[Tensor, Tensor]:
        """The k best tokens of every row, best first: the teacher's ids int64 [R, k], log-probabilities [R, k].

        ``noise`` [R, U] or [1, U] is the noise that drafter and teacher share, times the temperature: 0 for greedy
        text.
        """
        return self.chosen(self.perturbed(self.logits(normed_RH, teacher), noise_RU), k)

    def perturbed(self, logits_RU: Tensor, noise_RU: Tensor) -> Tensor:
        """Logits with their noise, fp32."""
        return cast_to(logits_RU, torch.float32) + cast_to(noise_RU, torch.float32)

    def chosen(self, logits_RU: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """``best`` of logits."""
        top_Rk, ids_Rk = torch.ops.draftwood.best(logits_RU.log_softmax(-1), k)
        if self.config.mapped:
            return self.teacher_ids.index_select(0, ids_Rk.flatten()).view_as(ids_Rk), top_Rk
        return ids_Rk.long(), top_Rk

    def rotary(self, position_R: Tensor, inside: bool = False) -> tuple[Tensor, Tensor]:
        """Cosine and sine [R, 1, D]; a position is clamped to the tables, unless all are ``inside``."""
        held_R = position_R if inside else position_R.clamp(0, self.draft_cos.shape[0] - 1)
        cos_R1D, sin_R1D = (t.index_select(0, held_R)[:, None] for t in (self.draft_cos, self.draft_sin))
        return cos_R1D, sin_R1D

    def extension(self, waiting: Waiting, cache: Tensor, form: Form) -> Extension:
        """Places the waiting rows in caches like this one; the rows that count end at slot ``committed`` - 1.

        Scattered, the other rows go to the spare slot C - 1, which no row that counts ever sees. Appended, they go to
        the slots after the text. The next pass writes these slots before it reads them. C is at least committed + rows.
        """
        rows, committed_1, accepted_1 = waiting.tokens_P.shape[0], waiting.committed_1, waiting.accepted_1
        order = partial(torch.arange, device=committed_1.device)
        kv_heads, order_P = self.config.block.kv_heads, order(rows)
        last_1, start_1 = (accepted_1 - 1).clamp(0, rows - 1), committed_1 - accepted_1
        if form == "cpu":
            order_C, half = order(cache.shape[2]), self.config.block.head_dim // 2
            cos_PE, sin_PE = (table[:, 0, :half] for table in self.rotary(start_1 + order_P))
            masked_PC = self.hidden_from(start_1 + order_P, order_C) if self.config.window else None
            slot_1 = (start_1 + (rows - 1)).to(torch.int32)
            return AppendedExtend(last_1, order_C >= committed_1, cos_PE, sin_PE, slot_1, masked_PC)
        slots = cache.shape[0] // kv_heads
        order_C = order(slots)
        # The other rows stand where they are written.
        slot_P = torch.where(order_P < accepted_1, start_1 + order_P, torch.full_like(order_P, slots - 1))
        index = (slot_P[:, None] + order(kv_heads) * slots).reshape(-1, 1)
        masked = self.hidden_from(slot_P, order_C)[None, None]
        factors = self.rotary(slot_P, inside=slots <= self.draft_cos.shape[0])
        return Scattered(last_1, order_C >= committed_1, Placement(index, masked), *factors, form)

    def hidden_from(self, position_P: Tensor, order_C: Tensor) -> Tensor:
        """Whether a slot comes after a row of the text or before the row's window, bool [P, C]."""
        hidden_PC = ~(order_C[None] <= position_P[:, None])
        return hidden_PC if self.config.window is None else hidden_PC | self.before_window(position_P, order_C)

    def before_window(self, position_P: Tensor, order_C: Tensor) -> Tensor:
        """Whether a slot lies before the window of a row, bool [P, C]."""
        assert self.config.window is not None
        return order_C[None] <= position_P[:, None] - self.config.window
