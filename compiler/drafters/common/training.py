"""Shared parts of students with caches: a Llama block in training, the teacher's states that they read, their files.

The block's attribute names are the published layouts'.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftwood.compiler.drafters.common.checkpoint import CachedCheckpoint, Config, Parts
from draftwood.compiler.drafters.common.export import network
from draftwood.errors import CheckpointError, RequestError

if TYPE_CHECKING:
    from draftwood.compiler.training.teacher import FrozenTeacher

# B texts, S slots, T rows, H hidden size, Q query heads, G key/value heads, E head size, V draft vocabulary


# Distances from the teacher's ends of the first and last state that is read. They are EAGLE-3's (SafeAILab/EAGLE) if
# the teacher has enough layers, otherwise smaller.
_MARGINS = ((2, 3), (1, 2), (0, 0))


@dataclass(frozen=True, slots=True)
class Sizes:
    """Dimensions of a drafter's block; config.json carries them under Hugging Face's names."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, taken in float32."""

    def __init__(self, hidden: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight, self.eps)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(sizes.hidden_size, sizes.intermediate_size, bias=False)
        self.up_proj = nn.Linear(sizes.hidden_size, sizes.intermediate_size, bias=False)
        self.down_proj = nn.Linear(sizes.intermediate_size, sizes.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Attention(nn.Module):
    """Projections, rotary positions and grouped-query attention in two forms."""

    frequencies: Tensor

    def __init__(self, sizes: Sizes, width: int) -> None:
        super().__init__()
        self.head_dim, self.groups = sizes.head_dim, sizes.num_attention_heads // sizes.num_key_value_heads
        wide, narrow = (n * sizes.head_dim for n in (sizes.num_attention_heads, sizes.num_key_value_heads))
        self.q_proj = nn.Linear(width, wide, bias=False)
        self.k_proj = nn.Linear(width, narrow, bias=False)
        self.v_proj = nn.Linear(width, narrow, bias=False)
        self.o_proj = nn.Linear(wide, sizes.hidden_size, bias=False)
        exponents_E = torch.arange(0, sizes.head_dim, 2, dtype=torch.float32) / sizes.head_dim
        self.register_buffer("frequencies", sizes.rope_theta**-exponents_E, persistent=False)

    def queries(self, x_BTH: Tensor, position_BT: Tensor) -> Tensor:
        """[B, Q, T, E], rotated."""
        return self._rotated(self._heads(self.q_proj(x_BTH)), position_BT)

    def keys_values(self, x_BTH: Tensor, position_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Keys, rotated, and values, one a query head: [B, Q, T, E] each."""
        keys_BGTE = self._rotated(self._heads(self.k_proj(x_BTH)), position_BT)
        values_BGTE = self._heads(self.v_proj(x_BTH))
        return keys_BGTE.repeat_interleave(self.groups, 1), values_BGTE.repeat_interleave(self.groups, 1)

    def causal(self, x_BSH: Tensor) -> Tensor:
        """Every slot attends to itself and those before it; [B, S, H]."""
        position_1S = torch.arange(x_BSH.shape[1], device=x_BSH.device)[None]
        keys_BQSE, values_BQSE = self.keys_values(x_BSH, position_1S)
        queries_BQSE = self.queries(x_BSH, position_1S)
        return self.joined(F.scaled_dot_product_attention(queries_BQSE, keys_BQSE, values_BQSE, is_causal=True))

    def joined(self, heads_BQTE: Tensor) -> Tensor:
        """The output projection, [B, T, H]."""
        return self.o_proj(heads_BQTE.transpose(1, 2).flatten(2))

    def _heads(self, x_BTW: Tensor) -> Tensor:
        return x_BTW.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def _rotated(self, x_BQTE: Tensor, position_BT: Tensor) -> Tensor:
        """Rotate-half rotary embedding, as in Llama."""
        angle_B1TE = (position_BT[:, :, None] * self.frequencies).repeat(1, 1, 2)[:, None]
        first, second = x_BQTE.chunk(2, -1)
        cosine, sine = angle_B1TE.cos().to(x_BQTE.dtype), angle_B1TE.sin().to(x_BQTE.dtype)
        return x_BQTE * cosine + torch.cat((-second, first), -1) * sine


class Block(nn.Module):
    """A pre-norm Llama block; ``width`` is the width of its attention's input, if that is not the hidden size."""

    def __init__(self, sizes: Sizes, width: int | None = None) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(sizes.hidden_size, sizes.rms_norm_eps)
        self.self_attn = Attention(sizes, width or sizes.hidden_size)
        self.post_attention_layernorm = RMSNorm(sizes.hidden_size, sizes.rms_norm_eps)
        self.mlp = MLP(sizes)

    def forward(self, x_BSH: Tensor) -> Tensor:
        x_BSH = x_BSH + self.self_attn.causal(self.input_layernorm(x_BSH))
        return x_BSH + self.mlp(self.post_attention_layernorm(x_BSH))


def aux_layers(teacher: FrozenTeacher) -> tuple[int, ...]:
    """The layers whose entering states are read: 2, L // 2 and L - 3 of a teacher of seven layers or more.

    Raises:
        RequestError: the teacher has too few layers for three different ones.
    """
    layers = teacher.config.layers
    for low, high in _MARGINS:
        if low < layers // 2 < layers - high:
            return low, layers // 2, layers - high
    raise RequestError(f"the teacher has {layers} layers; expected 2 or more, since a drafter reads three states of it")


def teacher_sizes(teacher: FrozenTeacher) -> Sizes:
    """The dimensions of the teacher's own blocks."""
    config = teacher.config
    return Sizes(
        config.hidden, teacher.mlp_width, config.heads, config.kv_heads, config.head_dim, config.rms_norm_eps,
        config.rope_theta,
    )  # fmt: skip


def read_trained(
    opened: CachedCheckpoint[Config], parts: Parts, others: Mapping[str, bool]
) -> tuple[Sizes, dict[str, Tensor], Tensor | None]:
    """A drafter for a student: its block's sizes, its weights by the keys of ``parts``, and its draft ids int64 [V], if
    it has a part of the vocabulary.

    Raises:
        CheckpointError: the drafter has something that no student computes: of all kinds, or one of ``others``.
    """
    config, block = opened.config, opened.config.block
    foreign = {
        "an embedding of its own": config.own_embedding,
        "an output matrix of its own": not config.tied_head,
        "rope scaling": block.rope_scaling is not None,
        "attention biases": block.qkv_bias,
        "a window": config.window is not None,
    }
    for what, there in {**foreign, **others}.items():
        if there:
            raise CheckpointError(
                f"{opened.files[0].parent}: a drafter with {what}; expected one as trainings here make it; to count it,"
                " build a bundle with it and calibrate that"
            )
    sizes = Sizes(
        block.hidden, block.intermediate, block.heads, block.kv_heads, block.head_dim, block.rms_norm_eps,
        block.rope_theta,
    )  # fmt: skip
    return sizes, network(opened, parts), opened.ids if config.mapped else None
