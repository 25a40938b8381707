"""Three ways to accept a drafted chain in sampled text, computed at the same contexts from eager networks.

* **shared noise**: the drafter ranks with the noise that the teacher draws with; a token is accepted where both take
  the same one. This is what Draftwood does.
* **no noise**: the drafter proposes its most probable token x, accepted with the teacher's p(x). So EAGLE-2 and 3
  accept, whose rejection sampling takes proposals for certain.
* **rejection**: the drafter draws x from its own q, accepted with min(1, p(x) / q(x)) (Leviathan et al., 2023).

The last two are expectations, taken over no draw of the teacher's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftwood.compiler.drafters.common.layers import CachedNetwork, Extended, Waiting
from draftwood.noise import gumbel_row, key_of
from draftwood.runtime.speculation.sequence import SequenceState
from draftwood.runtime.speculation.step import Draft
from draftwood.tools.reference.eager import EagerEngine
from draftwood.trees import Topology, tensorize

# n tokens before the root, D levels, U draft vocabulary, V vocabulary, F features

# The token that a chain goes on with: of a level's number and its log-probabilities [U], the place in U.
Pick = Callable[[int, NDArray[np.float64]], int]
SHARED, ALONE, REJECTION = "shared noise", "no noise", "rejection"
WAYS = (SHARED, ALONE, REJECTION)


def accepted(
    engine: EagerEngine, state: SequenceState, text: Sequence[int], features_nF: Tensor, at: int, levels: int
) -> dict[str, list[float]]:
    """Chances [D] that a chain's first, second, ... token is accepted behind ``text[:at]``, by way; of a whole path,
    so that one and their sum are tokens a step. Shared noise is told by the text itself, which was drawn with it.

    ``state`` is a text of the engine's that holds less of it, and then all of it but the root.
    """
    ids_U, sampling = engine.bundle.draft_ids, state.sampling
    random = np.random.default_rng([sampling.seed, at])
    temperature, vocabulary = sampling.temperature, engine.bundle.manifest.dims.vocabulary

    def noisy(level: int, log_U: NDArray[np.float64]) -> int:
        row_V = gumbel_row(vocabulary, key_of(sampling.seed, at + level))
        return int(np.argmax(log_U / temperature + (row_V if ids_U is None else row_V[ids_U])))

    def drawn(level: int, log_U: NDArray[np.float64]) -> int:
        return int(random.choice(len(log_U), p=softened(log_U, temperature)))

    extended = read(engine, text[:at], features_nF[: at - 1])
    shared, alone, rejection = (
        chain(engine, extended, levels, temperature, pick)
        for pick in (noisy, lambda _, log_U: int(log_U.argmax()), drawn)
    )
    right = [one == other for one, other in zip(shared.tokens, text[at : at + levels], strict=True)]
    of_alone_DV, of_rejection_DV = laws(engine, state, text[:at], (alone.tokens, rejection.tokens))
    return {
        SHARED: np.cumprod(right).astype(float).tolist(),
        ALONE: reached(of_alone_DV, alone.tokens, None),
        REJECTION: reached(of_rejection_DV, rejection.tokens, rejection.chances),
    }


def reached(teacher_DV: NDArray[np.float64], tokens: Sequence[int], chances: Sequence[float] | None) -> list[float]:
    """The chance that a chain is accepted down to each level; ``chances`` are q(x) of tokens that were drawn from q,
    None of those that were proposed for certain."""
    own_D = teacher_DV[np.arange(len(tokens)), list(tokens)]
    return np.cumprod(np.minimum(1.0, own_D if chances is None else own_D / np.array(chances))).tolist()


def softened(log_U: NDArray[np.float64], temperature: float) -> NDArray[np.float64]:
    """A distribution at a temperature, of logits or log-probabilities."""
    scaled_U = log_U / temperature
    weights_U = np.exp(scaled_U - scaled_U.max())
    return weights_U / weights_U.sum()


def laws(
    engine: EagerEngine, state: SequenceState, ids: Sequence[int], chains: Sequence[Sequence[int]]
) -> list[NDArray[np.float64]]:
    """The teacher's distributions [D, V] of every token of chains behind a text, whose last token is the root; one
    tree holds them all."""
    engine.prefill(state, np.array(ids[state.length : -1], np.int64))
    levels, before = len(chains[0]), state.length
    tree = Topology.from_paths([(one, *[0] * depth) for one in range(len(chains)) for depth in range(levels)])
    buffers, tokens_T = tensorize(tree), np.full(tree.rows, ids[-1], np.int64)
    rows = [[row for row, path in enumerate(tree.paths, 1) if path[0] == one] for one in range(len(chains))]
    for own, tokens in zip(rows, chains, strict=True):
        tokens_T[own] = tokens
    (out,) = engine.verify([state], [Draft(tokens_T, np.zeros(0, np.float32), buffers)])
    state.branched(tokens_T)
    state.rollback(before)
    temperature = state.sampling.temperature
    return [
        np.stack([softened(out.logits_RV[row].astype(np.float64), temperature) for row in (0, *own[:-1])])
        for own in rows
    ]


class Chain(NamedTuple):
    """The teacher's ids of a drafted chain, and q of each."""

    tokens: list[int]
    chances: list[float]


@torch.inference_mode()
def chain(engine: EagerEngine, extended: Extended, levels: int, temperature: float, pick: Pick) -> Chain:
    """A chain behind a text that the drafter has read."""
    ids_U, tokens, chances = engine.bundle.draft_ids, list[int](), list[float]()
    for level, log_U in enumerate(_levels(engine, extended, levels, tokens)):
        place = pick(level, log_U)
        tokens.append(place if ids_U is None else int(ids_U[place]))
        chances.append(float(softened(log_U, temperature)[place]))
    return Chain(tokens, chances)


@torch.inference_mode()
def read(engine: EagerEngine, ids: Sequence[int], features_nF: Tensor) -> Extended:
    """What the drafter has of a text, whose last token is the root; ``features`` are those of the tokens before."""
    drafter = cast(CachedNetwork, engine.drafter)
    step: Any = next(iter(engine.draft_steps.values())).module
    block, count = drafter.config.block, len(ids) - 1
    caches = [torch.zeros(block.kv_heads * (count + 1), block.head_dim) for _ in range(2 * block.layers)]
    waiting = Waiting(torch.tensor(ids[1:]), features_nF, torch.tensor([count]), torch.tensor([count]))
    return drafter.extend(waiting, caches, step.teacher, "eager")


def _levels(
    engine: EagerEngine, extended: Extended, levels: int, chosen: Sequence[int]
) -> Iterator[NDArray[np.float64]]:
    """The drafter's log-probabilities [U] of every level; ``chosen`` grows by a level's token before the next."""
    drafter = cast(CachedNetwork, engine.drafter)
    step: Any = next(iter(engine.draft_steps.values())).module
    if drafter.root_states > 1:
        for hidden_H in drafter.levels(extended, step.teacher)[:levels]:
            yield _log(drafter.logits(hidden_H[None], step.teacher))
        return
    rows: Any = drafter.root(extended, step.teacher, torch.zeros(levels, drafter.config.draft_vocabulary))
    for level in range(levels):
        if level:
            token = torch.tensor([chosen[-1]])
            rows = rows.below(token, torch.zeros(1, dtype=torch.int64), torch.zeros(1, level, dtype=torch.bool))
        yield _log(drafter.logits(rows.hidden.normed_RH, step.teacher))


def _log(logits_1U: Tensor) -> NDArray[np.float64]:
    return torch.log_softmax(logits_1U[0].double(), -1).numpy()
