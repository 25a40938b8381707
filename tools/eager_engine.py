"""The reference engine: eager PyTorch over a bundle's own weights, behind the same interface as the others."""

from __future__ import annotations

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from draftwood.compiler.bundle import load_modules
from draftwood.compiler.config import TeacherConfig
from draftwood.compiler.ge.weights import map_npu_weights, read_index
from draftwood.compiler.weights import map_weights
from draftwood.errors import BundleError
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.cache import Cache
from draftwood.runtime.engine import StepResult
from draftwood.trees import TreeBuffers


class EagerEngine:
    """Runs every step with plain PyTorch attention and no graph; slow, and independent of any lowering.

    In fp32 over the weights of the ONNX graphs, or with ``npu`` in the type and over the weights of the NPU's.
    """

    def __init__(self, bundle: Bundle, npu: bool = False) -> None:
        self.bundle = bundle
        manifest = bundle.manifest
        config = msgspec.convert(manifest.teacher.config, TeacherConfig)
        drafter = manifest.drafter
        heads = (drafter.levels, drafter.blocks, drafter.tied) if drafter else None
        weights = _npu_weights(bundle) if npu else _onnx_weights(bundle)
        self.decoder, self.heads = load_modules(weights, config, heads)
        self.dtype = weights["norm.weight"].dtype

    def new_cache(self, slots: int) -> Cache:
        return Cache(self.bundle.manifest.dims, slots, zeros=self._zeros)

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
        tokens_IK, scores_IK = self.heads(torch.tensor(hidden_1H).to(self.dtype), lm_head, count)
        return tokens_IK.numpy(), scores_IK.float().numpy()

    def _zeros(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.zeros(shape, dtype=self.dtype)

    @torch.inference_mode()
    def _run(
        self,
        cache: Cache,
        tokens_T: NDArray[np.int64],
        depths_T: NDArray[np.int64],
        visible_TT: NDArray[np.bool_],
        branch: torch.Tensor | None = None,
    ) -> StepResult:
        moved = len(cache.moved)
        out = self.decoder.step(
            torch.tensor(tokens_T),
            torch.tensor(depths_T),
            torch.tensor(visible_TT),
            torch.tensor([cache.length]),
            torch.tensor([moved]),
            torch.tensor(cache.moved, dtype=torch.int64),
            cache.branch,
            [side.flatten(0, 1) for side in cache.sides],
            form="eager",
        )
        for side, written in zip(cache.sides, out.caches, strict=True):
            side.copy_(written.view_as(side))
        if branch is not None:
            branch.copy_(out.branch_L2TKD)
        return StepResult(out.logits_RV.float().numpy(), out.choice_R.numpy(), out.hidden_RH.float().numpy())


def _onnx_weights(bundle: Bundle) -> dict[str, torch.Tensor]:
    if bundle.manifest.weights is None:
        raise BundleError(f"{bundle.folder}: holds no ONNX graphs and no fp32 weights; build it with --target onnx,ge")
    return map_weights(bundle.folder / bundle.manifest.weights)


def _npu_weights(bundle: Bundle) -> dict[str, torch.Tensor]:
    npu = bundle.manifest.npu
    if npu is None:
        raise BundleError(f"{bundle.folder}: holds no NPU graphs; build it with --target onnx,ge")
    index = bundle.folder / npu.index
    return map_npu_weights(index.parent, read_index(index))
