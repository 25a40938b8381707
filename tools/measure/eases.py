"""How much texts differ: the spread of their eases around what a plan counted, by maximum likelihood.

    python -m draftwood.tools.measure.eases TRACE... [--json]

The traces are those of `draftwood replay --record` with a bundle of a plan. Each text is walked as a decoding with the
plan's whole union of trees would, so that every walk begins where the one before it ended.

Shape suffixes: T rows of the union of all trees, E eases on a grid, X texts.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from draftwood.errors import RequestError
from draftwood.planned import Prior
from draftwood.runtime.policy import Gears
from draftwood.tools.measure.replay import Text, read_surveys
from draftwood.tools.script import refusing
from draftwood.trees import Topology
from draftwood.trees.prior import hazards_at, odds_of

# Log-odds: eases that are tried for a text, and spreads and centres for all. The least spread is the grid's step.
GRID_E = np.linspace(-4.0, 4.0, 81)
SPREADS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 1.3, 1.6)
CENTRES = np.linspace(-1.5, 1.5, 31)
# Twice so much log-likelihood is the 95 % point of chi-square with one degree of freedom.
INTERVAL = 1.92


def fit(likelihood_XE: NDArray[np.float64]) -> dict[str, float]:
    """Centre and spread of a normal ease, and the interval of the spread, from log-likelihoods by text and ease.

    A text of no steps says nothing of the ease and moves nothing.
    """
    most_X1 = likelihood_XE.max(1, keepdims=True)
    relative_XE = np.exp(likelihood_XE - most_X1)

    def total(centre: float, spread: float) -> float:
        weights_E = np.exp(-0.5 * ((GRID_E - centre) / spread) ** 2)
        return float(np.log(relative_XE @ (weights_E / weights_E.sum())).sum())

    profile = {spread: max((total(centre, spread), centre) for centre in CENTRES) for spread in SPREADS}
    spread = max(profile, key=lambda one: profile[one][0])
    likely = [one for one in SPREADS if profile[one][0] >= profile[spread][0] - INTERVAL]
    return {"centre": float(profile[spread][1]), "spread": spread, "from": min(likely), "to": max(likely)}


def likelihoods(text: Text, prior: Prior, bounds: Sequence[int]) -> NDArray[np.float64]:
    """float64[E]: how likely the text's walks are, by its ease; logarithms."""
    tree = Topology.from_paths(prior.paths)
    rows = {path: row for row, path in enumerate([(), *tree.paths])}
    middle = prior.classes[len(prior.classes) // 2]
    tables = [_tables(tree, odds_of(tree, hazards)) for hazards in middle.hazards]
    found_E, at = np.zeros(len(GRID_E)), 0
    while at < len(text.events):
        event = text.events[at]
        place = sum(event.confidence >= bound for bound in bounds) if event.confidence is not None else 0
        known = event.path if event.rank is None else (*event.path, event.rank)
        depth = next((d for d in range(len(known)) if known[: d + 1] not in rows), len(known))
        reached_TE, missed_TE = tables[place]
        row = rows[known[:depth]]
        found_E += reached_TE[row]
        if event.rank is None or depth < len(known):
            found_E += missed_TE[row]
        at += depth + 1
    return found_E


def _tables(tree: Topology, odds_T: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Logarithms by row and ease: of coming to a row, and of the next token being none of its children."""
    reached_TE, missed_TE = np.zeros((2, tree.rows, len(GRID_E)))
    for e, ease in enumerate(GRID_E):
        hazards_T = np.array((1.0, *hazards_at(tree, odds_T, float(ease))))
        for row in range(tree.rows):
            own = list(tree.children(row))
            missed_TE[row, e] = np.log(max(1 - hazards_T[own].sum(), 1e-9))
            reached_TE[own, e] = reached_TE[row, e] + np.log(np.maximum(hazards_T[own], 1e-9))
    return reached_TE, missed_TE


def measure(gears: Gears, texts: Sequence[Text]) -> dict[str, dict[str, float]]:
    """`fit` of greedy and of sampled texts, where there are any, with their number.

    Raises:
        RequestError: the bundle was built without a plan, so nothing was counted.
    """
    if gears.planning is None:
        raise RequestError("these texts are of a bundle without a plan; record them with one built by --tree plan:FILE")
    found = {}
    for greedy, name in ((True, "greedy"), (False, "sampled")):
        own = [text for text in texts if text.greedy == greedy]
        if own:
            prior = gears.planning.prior(greedy)
            found[name] = fit(np.array([likelihoods(text, prior, gears.bounds) for text in own])) | {"texts": len(own)}
    return found


@refusing
def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m draftwood.tools.measure.eases", description=__doc__)
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = measure(*read_surveys(args.traces))
    if args.json:
        print(json.dumps(found))
        return 0
    for name, one in found.items():
        print(
            f"{name}: spread {one['spread']:g} in log-odds (95 %: {one['from']:g} to {one['to']:g}), "
            f"centre {one['centre']:+.2f}, {one['texts']} texts"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
