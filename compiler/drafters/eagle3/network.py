"""The EAGLE-3 drafter (Li et al., 2025, arXiv 2503.01840) over a cache of accepted text.

One decoder block reads the embedding of a token beside what is known of the text before it: fc over three states
of the teacher for accepted text, the drafter's own last hidden state further on. Its output matrix ranks the
next token.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from draftwood.compiler.drafters.common.config import AUX_STATES
from draftwood.compiler.drafters.common.layers import CachedNetwork, DraftLayer, TeacherWeights, Waiting
from draftwood.compiler.drafters.eagle3.config import Eagle3Config
from draftwood.compiler.teachers.block import Form, Norm
from draftwood.compiler.teachers.config import TeacherConfig

# P rows that extend the cache, R rows of a tree level, S tree rows kept, F = 3 * teacher's hidden size, H hidden,
# K key/value heads, D head dimension, C cache slots


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
    """A block's output: ``normed`` is what the output matrix reads, ``fed_back`` what the next level reads."""

    normed_RH: Tensor
    fed_back_RH: Tensor


class Written(NamedTuple):
    """What an extend pass leaves to the levels of a tree: the root's output, the caches, what to hide."""

    root: Hidden
    caches: list[Tensor]
    committed_1: Tensor
    unseen_C: Tensor

    @property
    def normed(self) -> Tensor:
        """The root's hidden state behind the last norm [1, H]."""
        return self.root.normed_RH


class Branch(NamedTuple):
    """Keys and values of the tree rows run so far, each [S, K, D]; the root's are in the cache."""

    keys_SKD: Tensor
    values_SKD: Tensor


class Eagle3(CachedNetwork):
    """The network. Parameter names are the bundle's weight names; the caller fills them."""

    config: Eagle3Config

    def __init__(self, config: Eagle3Config, positions: int) -> None:
        super().__init__(config, positions)
        epsilon = config.block.rms_norm_eps
        self.block = Eagle3Layer(config.block, config.norm_before_residual)
        if config.feature_norm == "whole":
            self.feature_norm = Norm(AUX_STATES * config.target_hidden, epsilon)
        elif config.feature_norm == "each":
            self.feature_norms = nn.ModuleList(Norm(config.target_hidden, epsilon) for _ in config.aux_layers)

    def fused(self, features_PF: Tensor) -> Tensor:
        """The three teacher states of every row, low layer first, as one hidden state [P, H]."""
        if self.config.feature_norm == "whole":
            features_PF = self.feature_norm(features_PF)
        elif self.config.feature_norm == "each":
            states = features_PF.split(self.config.target_hidden, -1)
            norms = cast(Iterable[Norm], self.feature_norms)
            features_PF = torch.cat([norm(state) for norm, state in zip(norms, states, strict=True)], -1)
        return self.fc(features_PF)

    def extend(self, waiting: Waiting, caches: list[Tensor], teacher: TeacherWeights, form: Form = "fused") -> Written:
        """Writes the waiting rows into the caches and runs the last that counts, whose output is the root's.

        ``caches`` are flat [K*C, D], or with ``form`` "cpu" [1, K, C, D], key then value.
        """
        at = self.extension(waiting, caches[0], form)
        fused_PH = self.fused(waiting.features_PF)
        joined, residual_PH = self.block.join(self.embed(waiting.tokens_P, teacher), fused_PH)
        attended, written = at.attend(self.block, joined, caches)
        root = self.finish(attended.index_select(0, at.last_1), residual_PH.index_select(0, at.last_1))
        return Written(root, written, waiting.committed_1, at.unseen_C)

    def level(
        self,
        tokens_R: Tensor,
        fed_back_RH: Tensor,
        depth: int,
        branch: Branch | None,
        masked_RS: Tensor,
        written: Written,
        teacher: TeacherWeights,
    ) -> tuple[Hidden, Branch]:
        """Runs tree rows of one depth >= 1 on the hidden states of their parents.

        ``masked`` covers the branch with these rows behind it (True = masked out); returns both.
        """
        rows = tokens_R.shape[0]
        cos_R1D, sin_R1D = self.rotary((written.committed_1 + (depth - 1)).expand(rows))
        joined, residual_RH = self.block.join(self.embed(tokens_R, teacher), fed_back_RH)
        q_RND, k_RKD, v_RKD = self.block.rotated(joined, cos_R1D, sin_R1D)
        if branch is not None:
            k_RKD, v_RKD = torch.cat((branch.keys_SKD, k_RKD)), torch.cat((branch.values_SKD, v_RKD))
        branch = Branch(k_RKD, v_RKD)
        attended = self.block.attend_tree(q_RND, written.caches, written.unseen_C, branch, masked_RS)
        return self.finish(attended, residual_RH), branch

    def finish(self, attended: Tensor, residual_RH: Tensor) -> Hidden:
        """The feed-forward half of the block, and the last norm."""
        down_RH, residual_RH = self.block.feed_forward(attended, residual_RH)
        normed_RH, hidden_RH = self.draft_norm.added(down_RH, residual_RH)
        return Hidden(normed_RH, normed_RH if self.config.norm_output else hidden_RH)
