"""How far back a drafter looks: the weights of its heads, computed from the queries and keys of the eager network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftwood.compiler.drafters.common.layers import CachedNetwork, DraftLayer
from draftwood.tools.lab.rejecting import chain, read
from draftwood.tools.reference.eager import EagerEngine

# n tokens before the root, P rows of a pass, S rows seen, N query heads, K key/value heads, G = N / K,
# D head dimension, F features

# A pass of a layer: its queries [P, N, D] and keys [P, K, D], rotated.
Pass = tuple[DraftLayer, Tensor, Tensor]


@torch.inference_mode()
def features_of(engine: EagerEngine, ids: Sequence[int]) -> Tensor:
    """The teacher's states [n, F] that the drafter reads, of every token of a text."""
    order, kv = torch.arange(len(ids)), engine.begin(len(ids) + 1).kv
    none = torch.zeros(1, dtype=torch.int64)
    return engine.decoder.step(
        torch.tensor(ids), order, order[None] <= order[:, None], none, none, none[:0], kv.branch,
        [buffer.flatten(0, 1) for buffer in kv.buffers], form="eager",
    ).features_RF  # fmt: skip


@torch.inference_mode()
def by_distance(engine: EagerEngine, ids: Sequence[int], features_nF: Tensor, levels: int) -> list[NDArray[np.float64]]:
    """For every level of a draft behind ``ids``, whose last token is the root: the weight that its query gives to what
    lies 0 (itself), 1, 2, ... positions back, [heads, S], of all layers of a level; each row sums to 1.

    A level of FastEagle is a layer, whose query is the root's; a level of EAGLE-3 is a pass, whose query is that of the
    token it has ranked first on the level before. Its keys are those of the text and of the draft so far.
    """
    drafter = cast(CachedNetwork, engine.drafter)
    assert drafter.config.window is None, "a window hides what lies before it"
    with recorded(drafter) as passes:
        extended = read(engine, ids, features_nF[: len(ids) - 1])
        if drafter.root_states == 1:
            chain(engine, extended, levels, 1.0, lambda _, log_U: int(log_U.argmax()))
    weights = list(_weights(passes))
    share = 1 if drafter.root_states > 1 else drafter.config.block.layers
    return [np.concatenate(weights[at : at + share]) for at in range(0, len(weights), share)]


def _weights(passes: Sequence[Pass]) -> Iterator[NDArray[np.float64]]:
    """Of the last row of every pass and each head, over all rows that its layer has seen; nearest first."""
    held: dict[DraftLayer, Tensor] = {}
    for layer, q_PND, k_PKD in passes:
        held[layer] = torch.cat((held[layer], k_PKD)) if layer in held else k_PKD
        grouped_KGD = q_PND[-1].double().unflatten(0, (k_PKD.shape[1], -1))
        scores_KGS = torch.einsum("kgd,skd->kgs", grouped_KGD, held[layer].double()) * q_PND.shape[-1] ** -0.5
        yield torch.softmax(scores_KGS, -1).flatten(0, 1).flip(1).numpy()


@contextmanager
def recorded(drafter: CachedNetwork) -> Iterator[list[Pass]]:
    """What the drafter's layers turn into queries and keys in the body, pass by pass."""
    passes: list[Pass] = []
    layers = [layer for layer in drafter.modules() if isinstance(layer, DraftLayer)]

    def listen(layer: DraftLayer) -> None:
        rotated = layer.rotated

        def heard(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
            q_PND, k_PKD, v_PKD = rotated(*given)
            passes.append((layer, q_PND, k_PKD))
            return q_PND, k_PKD, v_PKD

        layer.rotated = heard  # type: ignore[method-assign, assignment]

    for layer in layers:
        listen(layer)
    try:
        yield passes
    finally:
        for layer in layers:
            del layer.rotated
