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
from draftwood.runtime.draft_cache import DraftCache
from draftwood.runtime.engine import StepResult
from draftwood.tools.reference.branch_cache import BranchCache
from draftwood.tools.reference.dump import StepDump, observed
from draftwood.tools.reference.eager import EagerEngine
from draftwood.tools.reference.hf_teacher import HfTeacher, TeacherStep
from draftwood.trees import TreeBuffers, violations


class TextCache(BranchCache):
    """The teacher's rows of a text, and what the drafter remembers of it; committed and rolled back together."""

    def __init__(self, layers: int, slots: int, draft: DraftCache | None) -> None:
        super().__init__(layers, slots)
        self.draft = draft

    def commit(self, rows: Sequence[int]) -> None:
        super().commit(rows)
        if self.draft:
            self.draft.commit(rows)

    def rollback(self, length: int) -> None:
        super().rollback(length)
        if self.draft:
            self.draft.rollback(length)

    def check(self) -> None:
        super().check()
        if self.draft:
            self.draft.check(self.length)


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

    def new_cache(self, slots: int) -> TextCache:
        drafter = self.bundle.manifest.drafter
        draft = DraftCache(drafter, self._zeros) if drafter else None
        return TextCache(self.teacher.layers, slots, draft)

    def prefill(self, cache: TextCache, tokens: NDArray[np.int64]) -> StepResult:
        order = np.arange(len(tokens))
        step = self.teacher.step(cache, tokens, order, order[None] <= order[:, None], last_only=True)
        result = _result(step)
        BranchCache.commit(cache, range(len(tokens)))  # the drafter is told by append
        if cache.draft:
            cache.draft.append(np.asarray(tokens), result.features_RF)
            self._drafting.keep_up(cache)
        return result.last()

    def verify(self, cache: TextCache, tokens_T: NDArray[np.int64], tree: TreeBuffers) -> StepResult:
        self._drafting.keep_up(cache)
        with self._dumping(cache, tokens_T, tree):
            for violation in violations(tree):
                raise InvariantError(f"tree: {violation.name} at row {violation.row}: {violation.message}")
            cache.check()
            step = self.teacher.step(cache, tokens_T, tree.depths, tree.mask)
            cache.check()
        result = _result(step)
        if cache.draft:
            cache.draft.open(tokens_T, result.features_RF)
        return result

    @contextmanager
    def _dumping(self, cache: TextCache, tokens_T: NDArray[np.int64], tree: TreeBuffers) -> Iterator[None]:
        try:
            yield
        except InvariantError as error:
            if self.dumps is None:
                raise
            folder = self.dumps / f"invariant-at-{cache.length}"
            folder = self._broken(cache, tokens_T, tree, str(error)).write(folder)
            raise InvariantError(f"{error}; the step is in {folder}") from error

    def _broken(self, cache: TextCache, tokens_T: NDArray[np.int64], tree: TreeBuffers, message: str) -> StepDump:
        """The step that broke an invariant, beside the same one in a cache computed afresh from the text."""
        fresh = self.new_cache(cache.slots)
        self.prefill(fresh, np.array(cache.text))
        step = self.teacher.step(fresh, tokens_T, tree.depths, tree.mask)
        return StepDump(
            reason="invariant",
            message=message,
            teacher=self.bundle.manifest.teacher.digest,
            slots=cache.slots,
            text=tuple(cache.text),
            tokens=tokens_T,
            tree=tree,
            expected=observed(fresh, fresh.length + tree.rows, _result(step)),
            got=observed(cache, cache.length + cache.open_rows),
        )


def _result(step: TeacherStep) -> StepResult:
    logits_RV = step.logits_RV.float().numpy()
    return StepResult(logits_RV, logits_RV.argmax(-1), step.features_TF.float().numpy())
