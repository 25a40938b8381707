"""The parts of a step for one text, as comparisons and timings want them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from draftwood.manifest import Gear
from draftwood.runtime.engines.engine import Engine
from draftwood.runtime.speculation.sequence import SequenceState
from draftwood.runtime.speculation.step import Draft, TeacherOutput
from draftwood.trees import TreeBuffers

# T tree rows, n tokens


def draft(engine: Engine, state: SequenceState, gear: Gear, root: int) -> Draft:
    """A tree of the gear after the text and the token ``root``."""
    state.root = root
    return engine.draft([state], [gear])[0]


def of_root(draft: Draft, right: Draft) -> Draft:
    """The draft with the root of the ``right`` one, as if it were of that."""
    return draft._replace(tokens_T=np.append(right.tokens_T[:1], draft.tokens_T[1:]))


def verify(engine: Engine, state: SequenceState, tokens_T: NDArray[np.int64], tree: TreeBuffers) -> TeacherOutput:
    """Runs a tree's rows after the text; the branch is left open, for ``state.commit`` to choose from."""
    proposal = Draft(np.asarray(tokens_T), np.zeros(0, np.float32), tree)
    (output,) = engine.verify([state], [proposal])
    state.branched(proposal.tokens_T, output.features_RF)
    return output
