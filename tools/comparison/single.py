"""The parts of a step for one sequence, as comparisons and timings want them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftwood.manifest import Gear
from draftwood.runtime.engines import StagedEngine
from draftwood.runtime.speculation.sequence import SequenceState
from draftwood.runtime.speculation.step import Draft, TeacherOutput
from draftwood.trees import TreeBuffers

# T tree rows, R rows with logits, V vocabulary, F features, n tokens


class Rows(NamedTuple):
    """The outputs of one sequence; views that the engine's next step overwrites."""

    logits_RV: NDArray[np.float32]
    choice_R: NDArray[np.int64]
    features_RF: NDArray[np.float32]


def rows_of(output: TeacherOutput) -> Rows:
    """The outputs of the first sequence."""
    return Rows(*(values[0] for values in output))


def prefill(engine: StagedEngine, state: SequenceState, tokens_n: NDArray[np.int64]) -> Rows:
    """Commits tokens; the last one's outputs."""
    return rows_of(engine.prefill(state, tokens_n))


def draft(engine: StagedEngine, state: SequenceState, gear: Gear, root: int) -> Draft:
    """A tree of the gear behind the text and the token ``root``."""
    state.root = root
    return engine.draft([state], gear)[0]


def verify(engine: StagedEngine, state: SequenceState, tokens_T: NDArray[np.int64], tree: TreeBuffers) -> Rows:
    """Runs a tree's rows behind the text; the branch is left open."""
    return rows_of(engine.verify([state], [Draft(np.asarray(tokens_T), np.zeros(0, np.float32), tree)]))
