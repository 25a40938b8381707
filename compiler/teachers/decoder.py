"""The teacher as a step: a Llama-family decoder over explicit caches.

A family whose network differs subclasses ``Decoder`` where it differs: other blocks, a scaled embedding, other masks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftwood.compiler.teachers.block import (
    Appended,
    Form,
    Layer,
    Norm,
    Placement,
    WrittenBlocks,
    place,
    place_rows,
    place_texts,
    turns_whole,
    whole_tables,
)
from draftwood.compiler.teachers.config import TeacherConfig

# T new rows, P rows moved from the branch (or positions of a table), B rows of the branch, R rows with logits,
# H hidden, F features, K key/value heads, D head dimension, E = D / 2, C cache slots, S visible slots, V vocabulary,
# L layers

# The result of a block's attention: attended rows [T, N*D], both caches.
Attended = tuple[Tensor, Any, Any]


class StepOutput(NamedTuple):
    """The result of a teacher's step; the caches are the inputs written in place (or their functional twins). The
    branch holds the new rows again, in forms that commit late."""

    logits_RV: Tensor
    choice_R: Tensor
    features_RF: Tensor
    caches: list[Any]
    branch_L2TKD: Any = None


def moved_rows(moved_L2PKD: Tensor) -> list[Tensor]:
    """Moved rows [P, K*D] as an NPU takes them, key then value of every layer. They are cut along columns: pieces cut
    along rows would be views, and GE would copy them to join them."""
    rows_XPE = moved_L2PKD.flatten(3).flatten(0, 1)
    pieces, moved, width = rows_XPE.shape
    return list(rows_XPE.transpose(0, 1).reshape(moved, pieces * width).split([width] * pieces, 1))


class Embedding(nn.Embedding):
    """A row for each token; it also scores hidden states if the output matrix is the embedding."""

    def scores(self, hidden_RH: Tensor) -> Tensor:
        """Logits [R, V]."""
        return F.linear(hidden_RH, self.weight)


class Decoder(nn.Module):
    """The whole teacher. Parameter names are the bundle's weight names; the caller fills them.

    ``aux_layers``: a step's ``features`` are the states of every row that enter these layers, low layer first. Without
    any they are the state after the last norm, of the rows with logits.
    """

    # Whether a trace has marks between the blocks.
    borders = False

    def __init__(self, config: TeacherConfig, positions: int, aux_layers: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.config, self.aux_layers = config, aux_layers
        self.embed = Embedding(config.vocabulary, config.hidden)
        self.layers = nn.ModuleList(self.make_layer(i) for i in range(config.layers))
        self.norm = Norm(config.hidden, config.rms_norm_eps)
        if not config.tied:
            self.lm_head = nn.Linear(config.hidden, config.vocabulary, bias=False)
        self.rope_cos: Tensor
        self.rope_sin: Tensor
        self.register_buffer("rope_cos", torch.empty(positions, config.head_dim))
        self.register_buffer("rope_sin", torch.empty(positions, config.head_dim))

    def make_layer(self, index: int) -> Layer:
        """Block ``index``; a family with its own blocks makes them here."""
        return Layer(self.config)

    @property
    def feature_width(self) -> int:
        """F: width of a row of features."""
        return self.config.hidden * max(len(self.aux_layers), 1)

    def embedded(self, tokens_T: Tensor) -> Tensor:
        """[T, H] of token ids, as the first block gets them."""
        return self.embed(tokens_T)

    def placement(
        self, visible_TT: Tensor, depths_T: Tensor, committed_1: Tensor, accepted_1: Tensor, moved: int, slots: int
    ) -> Placement:
        """The placement of a static step for all blocks; a subclass may add to it for its own blocks."""
        return place(visible_TT, committed_1, accepted_1, moved, slots, self.config.kv_heads)

    def rotary(self, position_T: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine [T, D] of positions."""
        cos_TD, sin_TD = (table.index_select(0, position_T) for table in (self.rope_cos, self.rope_sin))
        return cos_TD, sin_TD

    def head(self, hidden_RH: Tensor) -> Tensor:
        """Teacher logits [R, V] of final hidden states."""
        return self.embed.scores(hidden_RH) if self.config.tied else self.lm_head(hidden_RH)

    def step(
        self,
        tokens_T: Tensor,
        depths_T: Tensor,
        visible_TT: Tensor,
        committed_1: Tensor,
        accepted_1: Tensor,
        path_P: Tensor,
        branch_L2BKD: Tensor,
        caches: list[Tensor],
        rows_R: Tensor | None = None,
        form: Form = "fused",
    ) -> StepOutput:
        """Static step. caches: key then value of every layer, flat [K*C, D], or [C, K*D] in the NPU's form; rows_R None
        means all rows."""
        if form == "npu":
            return self._step_npu(
                tokens_T, depths_T, visible_TT, committed_1, accepted_1, path_P, branch_L2BKD, caches, rows_R
            )
        slots = caches[0].shape[0] // self.config.kv_heads
        placement = self.placement(visible_TT, depths_T, committed_1, accepted_1, path_P.shape[0], slots)
        cos_T1D, sin_T1D = (table[:, None] for table in self.rotary(committed_1 + depths_T))

        moved_L2PKD, news = branch_L2BKD.index_select(2, path_P), list[Tensor]()

        def attend(index: int, layer: Layer, x_TH: Tensor) -> Attended:
            pair = caches[2 * index : 2 * index + 2]
            out, new, *pair = layer.attend(
                x_TH, moved_L2PKD[index], *pair, cos_T1D=cos_T1D, sin_T1D=sin_T1D, placement=placement, form=form
            )
            news.append(new)
            return out, pair[0], pair[1]

        out = self._run(tokens_T, rows_R, attend)
        return out._replace(branch_L2TKD=torch.stack(news))

    def _step_npu(
        self,
        tokens_T: Tensor,
        depths_T: Tensor,
        visible_TT: Tensor,
        committed_1: Tensor,
        accepted_1: Tensor,
        path_P: Tensor,
        branch_L2BKD: Tensor,
        caches: list[Tensor],
        rows_R: Tensor | None,
    ) -> StepOutput:
        """`step` over caches [C, K*D]. Tensors that all layers share are cut and joined once, outside of them."""
        placement = place_rows(visible_TT, committed_1, accepted_1, path_P.shape[0], caches[0].shape[0])
        moved_E = moved_rows(branch_L2BKD.index_select(2, path_P))
        out = self._placed(tokens_T, committed_1 + depths_T, placement, moved_E, caches, rows_R)
        shape = (self.config.layers, 2, tokens_T.shape[0], *branch_L2BKD.shape[3:])
        return out._replace(branch_L2TKD=out.branch_L2TKD.view(shape))

    def step_texts(
        self,
        tokens_BT: Tensor,
        depths_BT: Tensor,
        visible_BTT: Tensor,
        committed_B: Tensor,
        accepted_B: Tensor,
        paths_P: Sequence[Tensor],
        branches_L2BKD: Sequence[Tensor],
        caches: list[Tensor],
    ) -> StepOutput:
        """Static step of B texts in the NPU's form, over pooled caches [B*C, K*D]; see `place_texts`. The outputs have
        the rows of all texts, text after text; the branch is [L, 2, B, T, K, D]."""
        texts, rows = tokens_BT.shape
        placement = place_texts(visible_BTT, committed_B, accepted_B, len(paths_P[0]), caches[0].shape[0] // texts)
        moved = [branch.index_select(2, path) for branch, path in zip(branches_L2BKD, paths_P, strict=True)]
        moved_E = moved_rows(torch.cat(moved, 2))
        positions_X = (committed_B[:, None] + depths_BT).flatten()
        out = self._placed(tokens_BT.flatten(), positions_X, placement, moved_E, caches, None)
        shape = (self.config.layers, 2, texts, rows, *moved[0].shape[3:])
        return out._replace(branch_L2TKD=out.branch_L2TKD.view(shape))

    def _placed(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        placement: Placement,
        moved_E: Sequence[Tensor],
        caches: list[Tensor],
        rows_R: Tensor | None,
    ) -> StepOutput:
        """All blocks in the NPU's form; the branch lies flat, [L*2*T, K*D]."""
        cos, sin = (t[None, :, None] for t in self.rotary(positions_T))
        projects = any(layer.own_projection for layer in cast(Iterable[Layer], self.layers))
        if turns_whole(self.config) and not projects:
            cos, sin = whole_tables(cos, sin, self.config)

        news: list[Tensor] = []

        def attend(index: int, layer: Layer, x_TH: Tensor) -> Attended:
            pair_of_layer = slice(2 * index, 2 * index + 2)
            out, new_2TE, pair = layer.attend_rows(
                x_TH, moved_E[pair_of_layer], caches[pair_of_layer], cos=cos, sin=sin, placement=placement
            )
            news.extend(new_2TE)
            return out, pair[0], pair[1]

        out = self._run(tokens_T, rows_R, attend)
        return out._replace(branch_L2TKD=torch.cat(news))

    def step_cpu(self, tokens_T: Tensor, rows_R: Tensor, appended: Appended, caches: Sequence[Tensor]) -> StepOutput:
        """Symbolic step for onnxruntime. caches: [1, K, C, D]."""
        half = self.config.head_dim // 2
        tables = {"cos_PE": self.rope_cos[:, :half], "sin_PE": self.rope_sin[:, :half]}

        def attend(index: int, layer: Layer, x_TH: Tensor) -> Attended:
            return layer.append(x_TH, caches[2 * index], caches[2 * index + 1], **tables, appended=appended)

        return self._run(tokens_T, rows_R, attend)

    def step_blocks(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        rows_R: Tensor,
        settled: Sequence[Tensor],
        caches: Sequence[Tensor],
        blocks: WrittenBlocks,
    ) -> StepOutput:
        """Symbolic step for onnxruntime with the same bits in every tree. settled and caches: [., K, B, D]."""
        half = self.config.head_dim // 2
        cos_TE, sin_TE = (t.index_select(0, positions_T)[:, :half] for t in (self.rope_cos, self.rope_sin))
        pairs = list(zip(settled, caches, strict=True))

        def attend(index: int, layer: Layer, x_TH: Tensor) -> Attended:
            key, value = pairs[2 * index : 2 * index + 2]
            return layer.attend_blocks(x_TH, key, value, cos_TE=cos_TE, sin_TE=sin_TE, blocks=blocks)

        return self._run(tokens_T, rows_R, attend)

    def _run(
        self, tokens_T: Tensor, rows_R: Tensor | None, attend: Callable[[int, Layer, Tensor], Attended]
    ) -> StepOutput:
        """All blocks, and the head on the rows asked for; ``attend`` runs the attention of one block, by its number."""
        residual_TH = self.embedded(tokens_T)
        added_TH: Tensor | None = None
        written: list[Any] = []
        states: list[Tensor] = []
        for i, layer in enumerate(cast(Iterable[Layer], self.layers)):
            added_TH, residual_TH = self._border(i, added_TH, residual_TH)
            normed_TH, residual_TH = layer.enter(added_TH, residual_TH)
            states += [residual_TH] * (i in self.aux_layers)
            out, *pair = attend(i, layer, normed_TH)
            added_TH, residual_TH = layer.feed_forward(out, residual_TH)
            written += pair
        added_TH, residual_TH = self._border(self.config.layers, added_TH, residual_TH)
        assert added_TH is not None, "a teacher has at least one layer"
        states += [added_TH + residual_TH] * (self.config.layers in self.aux_layers)
        if rows_R is not None:
            added_TH, residual_TH = added_TH.index_select(0, rows_R), residual_TH.index_select(0, rows_R)
        hidden_RH, _ = self.norm.added(added_TH, residual_TH)
        logits_RV = self.head(hidden_RH)
        features = torch.cat(states, -1) if states else hidden_RH
        return StepOutput(logits_RV, logits_RV.argmax(-1), features, written)

    def _border(self, number: int, added_TH: Tensor | None, residual_TH: Tensor) -> tuple[Tensor | None, Tensor]:
        """The values that pass from block ``number - 1`` to ``number``, marked for the cut of the trace there."""
        if not self.borders:
            return added_TH, residual_TH
        mark = torch.ops.draftwood.border
        return None if added_TH is None else mark(added_TH, number, 0), mark(residual_TH, number, 1)


class TeacherEnds(nn.Module):
    """The teacher's embedding and output matrix, those of them that a drafter's step reads.

    A step holds it as ``teacher``, so its parameters have the teacher's own weight names.
    """

    def __init__(self, decoder: Decoder, embeds: bool = False, scores: bool = False) -> None:
        super().__init__()
        tied = decoder.config.tied
        self.embed = decoder.embed if embeds or (scores and tied) else None
        self.lm_head = decoder.lm_head if scores and not tied else None

    def embedded(self, tokens_R: Tensor) -> Tensor:
        """[R, H] of token ids."""
        assert self.embed is not None, "the step did not say that it embeds tokens with the teacher's matrix"
        return self.embed(tokens_R)

    def scores(self, hidden_RH: Tensor) -> Tensor:
        """Logits [R, V] of hidden states."""
        if self.lm_head is not None:
            return self.lm_head(hidden_RH)
        assert self.embed is not None, "the step did not say that it reads the teacher's output matrix"
        return self.embed.scores(hidden_RH)
