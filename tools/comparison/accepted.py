"""Does acceptance in a graph give the tokens that the host's gives?"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from draftwood.manifest import Gear
from draftwood.runtime.engines.static import StaticEngine
from draftwood.runtime.speculation.sampling import Sampling
from draftwood.runtime.speculation.step import speculative_step
from draftwood.tools.comparison.compare import Comparison

STEPS = 4
SAMPLINGS = {
    "greedy": Sampling(),
    "sampled": Sampling(temperature=0.8, seed=1),
    "filtered": Sampling(temperature=1.0, top_k=40, top_p=0.9, seed=2),
}


def compare_acceptance(name: str, engine: StaticEngine, gear: Gear, prompt: NDArray[np.int64]) -> Iterator[Comparison]:
    """Steps of a gear twice on one engine: accepted by its graphs, and by the host from the logits of all rows.

    The difference is the share of tokens that are not the same; none may be.
    """
    for draws, sampling in SAMPLINGS.items():
        got, want = (engine.begin(gear.slots, sampling) for _ in range(2))
        texts: list[list[int]] = [[], []]
        for text, state in zip(texts, (got, want), strict=True):
            text += engine.start(state, prompt).tokens
            while len(text) <= STEPS:
                (done,) = engine.step([state], gear) if state is got else speculative_step(engine, [state], gear)
                text += done.tokens
        differing = [one != other for one, other in zip(*texts, strict=False)]
        share = float(np.mean(differing))
        yield Comparison(
            gear=gear.name,
            graph=gear.graph,
            graphs=name,
            quantity=f"{draws} tokens",
            difference=share,
            tolerance=0.0,
            where=f"{len(differing)} tokens",
        )
