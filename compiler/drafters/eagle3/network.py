"""The EAGLE-3 drafter (Li et al., 2025, arXiv 2503.01840) over a cache of accepted text.

One decoder block reads a token's embedding together with a state of the text before it. For accepted text that state is
fc over some states of the teacher (three in the paper). Further on it is the drafter's last hidden state. Further
blocks, if any, are a Llama's. The output matrix ranks the next token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor, nn

from draftwood.compiler.drafters.common.config import CachedConfig
from draftwood.compiler.drafters.common.layers import CachedNetwork, DraftLayer, Waiting, cast_to
from draftwood.compiler.drafters.common.trees import taken
from draftwood.compiler.teachers.block import Form, Norm
from draftwood.compiler.teachers.config import TeacherConfig
from draftwood.compiler.teachers.decoder import TeacherEnds

# P rows that extend the cache, R rows of a tree level, S tree rows kept, F width of the teacher's states, H hidden,
# K key/value heads, D head dimension, C cache slots


# Normalisation of the teacher's states before fc: none, as one vector, or each state separately.
FeatureNorm = Literal["none", "whole", "each"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Eagle3Config(CachedConfig):
    """An EAGLE-3 drafter with the norms that its successors move; all off is the published network.

    Of several blocks only the first reads an embedding; the others are a Llama's.
    """

    feature_norm: FeatureNorm = "none"
    # The first block's residual is the normalised hidden state instead of the hidden state.
    norm_before_residual: bool = False
    # The hidden state after the last norm is fed back (EAGLE-3.1), not the one before it.
    norm_output: bool = False


class Eagle3Layer(DraftLayer):
    """The block: q, k and v read cat(normed embedding, normed hidden); the hidden state is the residual."""

    def __init__(self, config: TeacherConfig, norm_before_residual: bool) -> None:
        super().__init__(config, 2 * config.hidden)
        self.hidden_norm = Norm(config.hidden, config.rms_norm_eps)
        self.norm_before_residual = norm_before_residual

    def join(self, embedded_RH: Tensor, hidden_RH: Tensor) -> tuple[Tensor, Tensor]:
        """(input [R, 2H], residual [R, H])."""
        normed_RH = self.hidden_norm(hidden_RH)
        residual_RH = normed_RH if self.norm_before_residual else hidden_RH
        return torch.cat((self.attn_norm(embedded_RH), normed_RH), -1), residual_RH


class Hidden(NamedTuple):
    """A block's output: the output matrix reads ``normed``, the next level reads ``fed_back``."""

    normed_RH: Tensor
    fed_back_RH: Tensor


# Cosine and sine [R, 1, D] of rows, or [1, 1, D] of one position.
Factors = tuple[Tensor, Tensor]
# Keys and values of the tree rows run so far, a pair [K, S, D] a block; the root's are in the caches.
Branch = list[tuple[Tensor, Tensor]]


class ExtendResult(NamedTuple):
    """The result of an extend pass for the levels of a tree: the root's output, the caches, the hidden slots."""

    root: Hidden
    caches: list[Tensor]
    committed_1: Tensor
    unseen_C: Tensor

    @property
    def normed(self) -> Tensor:
        """The root's hidden state after the last norm [1, H]."""
        return self.root.normed_RH


@dataclass(frozen=True, slots=True)
class BranchRows:
    """Rows of one depth, and the branch they ended; ``noise`` has a row a level."""

    drafter: Eagle3
    written: ExtendResult
    teacher: TeacherEnds
    noise: tuple[Tensor, ...]
    hidden: Hidden
    factors: tuple[Factors, ...]
    depth: int = 0
    branch: Branch | None = None

    def best(self, k: int) -> tuple[Tensor, Tensor]:
        return self.drafter.best(self.hidden.normed_RH, self.teacher, k, self.noise[self.depth])

    def below(self, tokens_E: Tensor, source_E: Tensor | None, masked_ES: Tensor | None) -> BranchRows:
        fed_back_EH, depth = taken(self.hidden.fed_back_RH, source_E), self.depth + 1
        hidden, branch = self.drafter.level(
            tokens_E, fed_back_EH, depth, self.branch, masked_ES, self.written, self.teacher, self.factors[self.depth]
        )
        return replace(self, hidden=hidden, depth=depth, branch=branch)


class Eagle3(CachedNetwork):
    """The network. Parameter names are the bundle's weight names; the caller fills them."""

    config: Eagle3Config

    def __init__(self, config: Eagle3Config, positions: int) -> None:
        super().__init__(config, positions)
        block = config.block
        self.block = Eagle3Layer(block, config.norm_before_residual)
        self.further = nn.ModuleList(DraftLayer(block) for _ in range(block.layers - 1))
        if config.feature_norm == "whole":
            self.feature_norm = Norm(config.features, block.rms_norm_eps)
        elif config.feature_norm == "each":
            self.feature_norms = nn.ModuleList(
                Norm(config.target_hidden, block.rms_norm_eps) for _ in config.aux_layers
            )

    def fused(self, features_PF: Tensor) -> Tensor:
        """The teacher states of every row, low layer first, as one hidden state [P, H]."""
        if self.config.feature_norm == "whole":
            features_PF = self.feature_norm(features_PF)
        elif self.config.feature_norm == "each":
            states = features_PF.split(self.config.target_hidden, -1)
            norms = cast(Iterable[Norm], self.feature_norms)
            features_PF = torch.cat([norm(state) for norm, state in zip(norms, states, strict=True)], -1)
        return self.fc(features_PF)

    def extend(
        self, waiting: Waiting, caches: list[Tensor], teacher: TeacherEnds, form: Form = "fused"
    ) -> ExtendResult:
        """Writes the waiting rows into the caches and runs the last that counts, whose output is the root's.

        ``caches`` are flat [K*C, D], or with ``form`` "cpu" [1, K, C, D], key then value of every block.
        """
        at, written = self.extension(waiting, caches[0], form), []

        def attend(i: int, layer: DraftLayer, x: Tensor) -> Tensor:
            attended, pair = at.attend(layer, x, caches[2 * i : 2 * i + 2])
            written.extend(pair)
            return attended

        entering = self.block.join(self.embed(waiting.tokens_P, teacher), self.fused(waiting.features_PF))
        root = self._through(entering, attend, at.last_1)
        return ExtendResult(root, written, waiting.committed_1, at.unseen_C)

    def root(self, extended: ExtendResult, teacher: TeacherEnds, noise_DU: Tensor) -> BranchRows:  # type: ignore[override]
        noise, levels = tuple(cast_to(noise_DU, torch.float32).split(1)), len(noise_DU) - 1
        factors: tuple[Factors, ...] = ()
        if levels:  # the rows of a level have one position
            tables = self.rotary(extended.committed_1 + torch.arange(levels, device=noise_DU.device))
            cos, sin = (table.split(1) if levels > 1 else [table] for table in tables)
            factors = tuple(zip(cos, sin, strict=True))
        return BranchRows(self, extended, teacher, noise, extended.root, factors)

    def level(
        self,
        tokens_R: Tensor,
        fed_back_RH: Tensor,
        depth: int,
        branch: Branch | None,
        masked_RS: Tensor | None,
        written: ExtendResult,
        teacher: TeacherEnds,
        factors: Factors | None = None,
    ) -> tuple[Hidden, Branch]:
        """Runs tree rows of one depth >= 1 on the hidden states of their parents. ``masked`` covers the branch and then
        these rows (True = masked out; None: nothing is); returns both. ``factors`` are those of the rows' position."""
        count = tokens_R.shape[0]
        position_R = written.committed_1 + torch.full((count,), depth - 1, device=tokens_R.device)
        of_rows = tuple(factor.expand(count, -1, -1) for factor in factors) if factors else self.rotary(position_R)
        embedded_RH = self.embed(tokens_R, teacher)
        return self.rows(embedded_RH, fed_back_RH, position_R, branch, masked_RS, written, cast(Factors, of_rows))

    def rows(
        self,
        embedded_RH: Tensor,
        hidden_RH: Tensor,
        position_R: Tensor,
        branch: Branch | None,
        masked_RS: Tensor | None,
        written: ExtendResult,
        factors: Factors | None = None,
    ) -> tuple[Hidden, Branch]:
        """Runs rows that write no cache: they see the text and the branch's rows that ``masked`` leaves visible."""
        cos_R1D, sin_R1D = factors or self.rotary(position_R)
        unseen, pairs = written.unseen_C, []
        if self.config.window is not None:
            unseen = unseen | self.before_window(position_R, torch.arange(unseen.shape[0], device=unseen.device))

        def attend(i: int, layer: DraftLayer, x: Tensor) -> Tensor:
            q_RND, *new = layer.rotated(x, cos_R1D, sin_R1D)
            k_KSD, v_KSD = (rows.transpose(0, 1) for rows in new)
            if branch is not None:
                k_KSD, v_KSD = torch.cat((branch[i][0], k_KSD), 1), torch.cat((branch[i][1], v_KSD), 1)
            pairs.append((k_KSD, v_KSD))
            return layer.attend_tree(q_RND, written.caches[2 * i : 2 * i + 2], unseen, pairs[i], masked_RS)

        return self._through(self.block.join(embedded_RH, hidden_RH), attend), pairs

    def _through(
        self,
        entering: tuple[Tensor, Tensor],
        attend: Callable[[int, DraftLayer, Tensor], Tensor],
        last_1: Tensor | None = None,
    ) -> Hidden:
        """All blocks and the last norm; of the last block's output all rows, or ``last``."""
        x, residual_RH = entering
        added_RH = residual_RH
        for i, layer in enumerate((self.block, *cast(Iterable[DraftLayer], self.further))):
            if i:
                x, residual_RH = layer.enter(added_RH, residual_RH)
            attended = attend(i, layer, x)
            if last_1 is not None and i == len(self.further):
                attended, residual_RH = (t.index_select(0, last_1) for t in (attended, residual_RH))
            added_RH, residual_RH = layer.feed_forward(attended, residual_RH)
        normed_RH, hidden_RH = self.draft_norm.added(added_RH, residual_RH)
        return Hidden(normed_RH, normed_RH if self.config.norm_output else hidden_RH)
