"""The engine whose teacher is a transformers model: the independent reference of every compiled engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from draftwood.compiler.teachers.checkpoint import Checkpoint
from draftwood.errors import CheckpointError, InvariantError
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.speculation.sequence import SequenceState
from draftwood.runtime.speculation.step import Draft, TeacherOutput
from draftwood.tools.comparison.single import rows_of
from draftwood.tools.reference.branch_cache import BranchCache
from draftwood.tools.reference.dump import StepDump, observed
from draftwood.tools.reference.eager import EagerEngine
from draftwood.tools.reference.hf_teacher import HfTeacher, TeacherStep
from draftwood.trees import violations


class HfEngine(EagerEngine):
    """Verifies with the transformers model; drafts as the eager engine does, from the transformers model's features.

    Every step checks the invariants of its tree and its cache. Where ``dumps`` is given, a step that breaks one
    is written there, to be replayed, before the InvariantError is raised.
    """

    def __init__(self, bundle: Bundle, teacher: HfTeacher, dumps: Path | None = None) -> None:
        super().__init__(bundle)
        self.teacher, self.dumps = HfTeacher(teacher.model, self.decoder.aux_layers), dumps

    @classmethod
    def open(cls, bundle: Bundle, folder: Path, trust_remote_code: bool = False, dumps: Path | None = None) -> HfEngine:
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
        return cls(bundle, HfTeacher.open(folder, trust_remote_code=trust_remote_code), dumps)

    def new_kv(self, slots: int) -> BranchCache:
        return self.teacher.new_cache(slots)

    def append(self, state: SequenceState, chunk_n: NDArray[np.int64]) -> TeacherOutput:
        order = np.arange(len(chunk_n))
        output = _output(self.teacher.step(state.kv, chunk_n, order, order[None] <= order[:, None], last_only=True))
        state.extended(chunk_n, output.features_BRF[0])
        return output

    def verify(self, states: Sequence[SequenceState], drafts: Sequence[Draft]) -> TeacherOutput:
        ((state, draft),) = zip(states, drafts, strict=True)
        with self._dumping(state, draft):
            for violation in violations(draft.tree):
                raise InvariantError(f"tree: {violation.name} at row {violation.row}: {violation.message}")
            state.check()
            step = self.teacher.step(state.kv, draft.tokens_T, draft.tree.depths, draft.tree.mask)
            state.check()
        output = _output(step)
        state.branched(draft.tokens_T, output.features_BRF[0])
        return output

    @contextmanager
    def _dumping(self, state: SequenceState, draft: Draft) -> Iterator[None]:
        try:
            yield
        except InvariantError as error:
            if self.dumps is None:
                raise
            folder = self.dumps / f"invariant-at-{state.length}"
            folder = self._broken(state, draft, str(error)).write(folder)
            raise InvariantError(f"{error}; the step is in {folder}") from error

    def _broken(self, state: SequenceState, draft: Draft, message: str) -> StepDump:
        """The step that broke an invariant, beside the same one in a cache computed afresh from the text."""
        tokens_T, tree, kv = draft.tokens_T, draft.tree, state.kv
        fresh = self.begin(state.slots)
        self.prefill(fresh, np.array(kv.text))
        output = rows_of(_output(self.teacher.step(fresh.kv, tokens_T, tree.depths, tree.mask)))
        return StepDump(
            reason="invariant",
            message=message,
            teacher=self.bundle.manifest.teacher.digest,
            slots=state.slots,
            text=tuple(kv.text),
            tokens=tokens_T,
            tree=tree,
            expected=observed(fresh, fresh.length + tree.rows, output),
            got=observed(state, state.length + kv.open_rows),
        )


def _output(step: TeacherStep) -> TeacherOutput:
    logits_RV = step.logits_RV.float().numpy()
    return TeacherOutput(logits_RV[None], logits_RV.argmax(-1)[None], step.features_TF.float().numpy()[None])
