"""The layers of a network that is split: each runs its device's part and joins the results as the plan says.

A network is made with a device's sizes (`shared_config`); here those layers are replaced whose parts have to be joined.
All devices run the same program. Only a device's weights, the first token of its part of the embedding among them, say
which device it is.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftwood.compiler.ranks.collectives import gathered, summed
from draftwood.compiler.ranks.plan import split_of
from draftwood.compiler.teachers.decoder import Embedding

# T rows, H hidden, V tokens of all, U tokens of one rank


class GatheredLinear(nn.Linear):
    """Makes its device's columns; all of them side by side are the result."""

    def __init__(self, whole: nn.Linear, ranks: int) -> None:
        super().__init__(whole.in_features, -(-whole.out_features // ranks), bias=whole.bias is not None)
        self.ranks, self.whole_features = ranks, whole.out_features

    def forward(self, x: Tensor) -> Tensor:
        return gathered(super().forward(x), self.ranks, self.whole_features)


class SplitEmbedding(Embedding):
    """Has the rows of tokens ``start`` to ``start + U - 1``; a token of another device is zero here."""

    start: Tensor

    def __init__(self, whole: nn.Embedding, ranks: int) -> None:
        super().__init__(-(-whole.num_embeddings // ranks), whole.embedding_dim)
        self.ranks, self.tokens = ranks, whole.num_embeddings
        self.register_buffer("start", torch.zeros(1, dtype=torch.int64))

    def forward(self, tokens_T: Tensor) -> Tensor:
        own_T = tokens_T - self.start
        held_T = own_T.clamp(0, self.num_embeddings - 1)
        rows_TH = super().forward(held_T)
        return summed(torch.where((held_T == own_T)[:, None], rows_TH, torch.zeros_like(rows_TH)))

    def scores(self, hidden_TH: Tensor) -> Tensor:
        return gathered(F.linear(hidden_TH, self.weight), self.ranks, self.tokens)


def split_layers(network: nn.Module, ranks: int) -> None:
    """Makes the layers of a network, made with one device's sizes, join the results of ``ranks`` devices."""
    if ranks == 1:
        return
    for name, layer in list(network.named_modules()):
        split = split_of(name)
        if split is None or split.joined == "apart" or isinstance(layer, nn.ModuleList):
            continue
        if isinstance(layer, nn.Embedding):
            network.set_submodule(name, SplitEmbedding(layer, ranks), strict=True)
        elif split.joined == "gathered":
            assert isinstance(layer, nn.Linear), f"{name} has a name of the plan and is no linear layer"
            network.set_submodule(name, GatheredLinear(layer, ranks), strict=True)
        else:
            layer.register_forward_hook(_summed)


def _summed(layer: nn.Module, inputs: tuple[Tensor, ...], part: Tensor) -> Tensor:
    """The sum over the devices of a layer's results for each device's part."""
    return summed(part)
