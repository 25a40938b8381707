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
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftwood.compiler.drafters.common.layers import CachedNetwork, Waiting
from draftwood.noise import gumbel_row, key_of
from draftwood.runtime.speculation.sampling import Sampling
from draftwood.tools.reference.eager import EagerEngine

# n tokens before the root, D levels, U draft vocabulary, V vocabulary, F features

# The token that a chain goes on with: of a level's number and its log-probabilities [U], the place in U.
Pick = Callable[[int, NDArray[np.float64]], int]
SHARED, ALONE, REJECTION = "shared noise", "no noise", "rejection"
WAYS = (SHARED, ALONE, REJECTION)


def accepted(
    engine: EagerEngine, text: Sequence[int], features_nF: Tensor, at: int, levels: int, sampling: Sampling
) -> dict[str, list[float]]:
    """Chances [D] that a chain's first, second, ... token is accepted behind ``text[:at]``, by way; of a whole path,
    so that one and their sum are tokens a step. Shared noise is told by the text itself, which was drawn with it."""
    ids_U = engine.bundle.draft_ids
    random = np.random.default_rng([sampling.seed, at])
    temperature, vocabulary = sampling.temperature, engine.bundle.manifest.dims.vocabulary

    def noisy(level: int, log_U: NDArray[np.float64]) -> int:
        row_V = gumbel_row(vocabulary, key_of(sampling.seed, at + level))
        return int(np.argmax(log_U / temperature + (row_V if ids_U is None else row_V[ids_U])))

    def drawn(level: int, log_U: NDArray[np.float64]) -> int:
        return int(random.choice(len(log_U), p=softened(log_U, temperature)))

    found: dict[str, list[float]] = {}
    for way, pick in ((SHARED, noisy), (ALONE, lambda _, log_U: int(log_U.argmax())), (REJECTION, drawn)):
        tokens, chances = chain(engine, text[:at], features_nF[: at - 1], levels, temperature, pick)
        if way == SHARED:
            right = [one == other for one, other in zip(tokens, text[at : at + levels], strict=True)]
            found[way] = np.cumprod(right).astype(float).tolist()
        else:
            teacher_DV = law(engine, [*text[:at], *tokens], levels, temperature)
            found[way] = reached(teacher_DV, tokens, chances if way == REJECTION else None)
    return found


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


@torch.inference_mode()
def law(engine: EagerEngine, ids: Sequence[int], levels: int, temperature: float) -> NDArray[np.float64]:
    """The teacher's distributions [D, V] of the last ``levels`` tokens of a text, each behind those before it."""
    order, kv = torch.arange(len(ids)), engine.begin(len(ids) + 1).kv
    none = torch.zeros(1, dtype=torch.int64)
    out = engine.decoder.step(
        torch.tensor(ids), order, order[None] <= order[:, None], none, none, none[:0], kv.branch,
        [buffer.flatten(0, 1) for buffer in kv.buffers], form="eager",
    )  # fmt: skip
    logits_DV = out.logits_RV[-levels - 1 : -1].double().numpy()
    return np.stack([softened(logits_V, temperature) for logits_V in logits_DV])


@torch.inference_mode()
def chain(
    engine: EagerEngine, ids: Sequence[int], features_nF: Tensor, levels: int, temperature: float, pick: Pick
) -> tuple[list[int], list[float]]:
    """The teacher's ids of a chain behind a text, whose last token is the root, and q of each."""
    ids_U, tokens, chances = engine.bundle.draft_ids, list[int](), list[float]()
    for level, log_U in enumerate(_levels(engine, ids, features_nF, levels, tokens)):
        place = pick(level, log_U)
        tokens.append(place if ids_U is None else int(ids_U[place]))
        chances.append(float(softened(log_U, temperature)[place]))
    return tokens, chances


def _levels(
    engine: EagerEngine, ids: Sequence[int], features_nF: Tensor, levels: int, chosen: Sequence[int]
) -> Iterator[NDArray[np.float64]]:
    """The drafter's log-probabilities [U] of every level; ``chosen`` grows by a level's token before the next."""
    drafter = cast(CachedNetwork, engine.drafter)
    step: Any = next(iter(engine.draft_steps.values())).module
    block, count = drafter.config.block, len(ids) - 1
    caches = [torch.zeros(block.kv_heads * (count + 1), block.head_dim) for _ in range(2 * block.layers)]
    waiting = Waiting(torch.tensor(ids[1:]), features_nF, torch.tensor([count]), torch.tensor([count]))
    extended = drafter.extend(waiting, caches, step.teacher, "eager")
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
