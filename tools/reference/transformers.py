"""The engine whose teacher is a transformers model: the independent reference of every compiled engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from draftwood.compiler.teachers.checkpoint import Checkpoint
from draftwood.errors import CheckpointError
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.speculation.sequence import SequenceState
from draftwood.runtime.speculation.step import Draft, TeacherOutput
from draftwood.tools.reference.branch_cache import BranchCache
from draftwood.tools.reference.eager import EagerEngine
from draftwood.tools.reference.hf_teacher import ForwardPass, HfTeacher
from draftwood.tools.reference.invariants import hold


class HfEngine(EagerEngine):
    """Verifies with the transformers model; drafts as the eager engine does, from the transformers model's features.

    The invariants are also checked before and after a single verify step.
    """

    def __init__(self, bundle: Bundle, teacher: HfTeacher) -> None:
        super().__init__(bundle)
        self.teacher = HfTeacher(teacher.model, self.decoder.aux_layers)

    @classmethod
    def open(cls, bundle: Bundle, folder: Path) -> HfEngine:
        """The engine over a teacher's own folder.

        Raises:
            CheckpointError: it is not the teacher that the bundle was built from, or transformers cannot load it.
        """
        digest, expected = Checkpoint.open(folder).digest(), bundle.manifest.teacher.digest
        if digest != expected:
            raise CheckpointError(
                f"{folder}: not the teacher of {bundle.folder} (SHA-256 {digest[:12]}..., expected"
                f" {expected[:12]}...); give the folder that the bundle was built from"
            )
        return cls(bundle, HfTeacher.open(folder))

    def new_kv(self, slots: int) -> BranchCache:
        return self.teacher.new_cache(slots)

    @property
    def parts(self) -> HfEngine:
        return self

    def append(self, state: SequenceState, chunk_n: NDArray[np.int64]) -> TeacherOutput:
        order = np.arange(len(chunk_n))
        output = _output(self.teacher.step(state.kv, chunk_n, order, order[None] <= order[:, None], last_only=True))
        state.extended(chunk_n, output.features_RF)
        return output

    def verify(self, states: Sequence[SequenceState], drafts: Sequence[Draft]) -> list[TeacherOutput]:
        (state,), (draft,) = states, drafts
        hold(states, drafts)
        step = self.teacher.step(state.kv, draft.tokens_T, draft.tree.depths, draft.tree.mask)
        state.check()
        return [_output(step)]


def _output(step: ForwardPass) -> TeacherOutput:
    logits_RV = step.logits_RV.float().numpy()
    return TeacherOutput(logits_RV, logits_RV.argmax(-1), step.features_TF.float().numpy())
