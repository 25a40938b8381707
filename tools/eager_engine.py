"""The reference engine: eager PyTorch over a bundle's own weights, behind the same interface as the others."""

from __future__ import annotations

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from draftwood.compiler.bundle import load_modules
from draftwood.compiler.config import TeacherConfig
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.cache import Cache
from draftwood.runtime.engine import StepResult
from draftwood.trees import TreeBuffers


class EagerEngine:
    """Runs every step with plain PyTorch attention and no graph; slow, and independent of any lowering."""

    def __init__(self, bundle: Bundle) -> None:
        self.bundle = bundle
        manifest = bundle.manifest
        config = msgspec.convert(manifest.teacher.config, TeacherConfig)
        drafter = manifest.drafter
        heads = (drafter.levels, drafter.blocks, drafter.tied) if drafter else None
        self.decoder, self.heads = load_modules(bundle.folder / manifest.weights, config, heads)

    def new_cache(self, slots: int) -> Cache:
        return Cache(self.bundle.manifest.dims, slots)

    def prefill(self, cache: Cache, tokens: NDArray[np.int64]) -> StepResult:
        rows = len(tokens)
        order = np.arange(rows)
        result = self._run(cache, tokens, order, order[None] <= order[:, None])
        cache.extended(rows)
        return StepResult(*(part[-1:] for part in result))

    def verify(self, cache: Cache, tokens_T: NDArray[np.int64], tree: TreeBuffers) -> StepResult:
        result = self._run(cache, tokens_T, tree.depths, tree.mask, cache.next_branch(tree.rows))
        cache.branched(tree.rows)
        return result

    @torch.inference_mode()
    def draft(self, hidden_1H: NDArray[np.float32]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        assert self.heads is not None and self.bundle.manifest.drafter is not None
        lm_head = self.decoder.head_weight if self.heads.tied else None
        count = self.bundle.manifest.drafter.candidates
        tokens_IK, scores_IK = self.heads(torch.tensor(hidden_1H), lm_head, count)
        return tokens_IK.numpy(), scores_IK.numpy()

    @torch.inference_mode()
    def _run(
        self,
        cache: Cache,
        tokens_T: NDArray[np.int64],
        depths_T: NDArray[np.int64],
        visible_TT: NDArray[np.bool_],
        branch: NDArray[np.float32] | None = None,
    ) -> StepResult:
        moved = len(cache.moved)
        out = self.decoder.step(
            torch.tensor(tokens_T),
            torch.tensor(depths_T),
            torch.tensor(visible_TT),
            torch.tensor([cache.length]),
            torch.tensor([moved]),
            torch.tensor(cache.moved, dtype=torch.int64),
            torch.tensor(cache.branch),
            [torch.tensor(side).flatten(0, 1) for side in cache.sides],
            form="eager",
        )
        for side, written in zip(cache.sides, out.caches, strict=True):
            side[:] = written.numpy().reshape(side.shape)
        if branch is not None:
            branch[:] = out.branch_L2TKD.numpy()
        return StepResult(out.logits_RV.numpy(), out.choice_R.numpy(), out.hidden_RH.numpy())
