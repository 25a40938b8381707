"""The reference engine: eager PyTorch over a bundle's own weights, behind the same interface as the others."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from draftwood.compiler.checkpoints.safetensors_file import map_tensors
from draftwood.compiler.drafters.kinds import drafter_of
from draftwood.compiler.ge.weights import map_npu_weights, read_index
from draftwood.compiler.targets.modules import load_modules
from draftwood.compiler.targets.steps import rebuild_drafts
from draftwood.compiler.teachers.registry import described_config
from draftwood.errors import BundleError
from draftwood.manifest import Gear, GraphSignature
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.cache import Cache
from draftwood.runtime.draft_cache import DraftCache
from draftwood.runtime.drafting import Draft, Drafting
from draftwood.runtime.engine import StepResult
from draftwood.trees import TreeBuffers


class EagerEngine:
    """Runs every step with plain PyTorch attention and no graph; slow, and independent of any lowering.

    In fp32 over the weights of the ONNX graphs, or with ``npu`` in the type and over the weights of the NPU's.
    """

    def __init__(self, bundle: Bundle, npu: bool = False) -> None:
        self.bundle = bundle
        manifest = bundle.manifest
        config = described_config(manifest.teacher.config)
        drafter = drafter_of(manifest.drafter) if manifest.drafter else None
        weights = npu_weights(bundle) if npu else _onnx_weights(bundle)
        self.decoder, self.drafter = load_modules(weights, config, drafter)
        self.dtype = weights["norm.weight"].dtype
        graphs = manifest.graph_set("ge" if npu else "onnx")
        assert graphs is not None, "its weights were found"
        self._drafting = Drafting(bundle, graphs.graphs, self._run_draft)
        topologies = {name: topology for name, (topology, _) in bundle.trees.items()}
        self.draft_steps = rebuild_drafts(manifest, graphs, topologies, (self.decoder, self.drafter))

    def new_cache(self, slots: int) -> Cache:
        return Cache(self.bundle.manifest.dims, slots, zeros=self._zeros, drafter=self.bundle.manifest.drafter)

    def prefill(self, cache: Cache, tokens: NDArray[np.int64]) -> StepResult:
        rows = len(tokens)
        order = np.arange(rows)
        result = self._run(cache, tokens, order, order[None] <= order[:, None])
        cache.extended(rows)
        if cache.draft:
            cache.draft.append(np.asarray(tokens), result.features_RF)
            self._drafting.keep_up(cache)
        return result.last()

    def verify(self, cache: Cache, tokens_T: NDArray[np.int64], tree: TreeBuffers) -> StepResult:
        self._drafting.keep_up(cache)
        result = self._run(cache, tokens_T, tree.depths, tree.mask, cache.next_branch(tree.rows))
        cache.branched(tree.rows)
        if cache.draft:
            cache.draft.open(tokens_T, result.features_RF)
        return result

    def draft(self, cache: Cache, gear: Gear, root: int) -> Draft:
        return self._drafting.draft(cache, gear, root)

    @torch.inference_mode()
    def _run_draft(self, graph: GraphSignature, inputs: dict[str, NDArray], text: DraftCache) -> dict[str, NDArray]:
        module = self.draft_steps[graph.name].module
        if hasattr(module, "form"):
            module.form = "eager"
        small = [torch.from_numpy(inputs[spec.name]) for spec in graph.inputs if spec.name in inputs]
        values = [value.to(self.dtype) if value.is_floating_point() else value for value in small]
        results = module(*values, *(side.flatten(0, 1) for side in text.sides))
        outputs = {spec.name: value for spec, value in zip(graph.outputs, results, strict=True)}
        for name, side in zip(graph.caches, text.sides, strict=True):
            side.copy_(outputs[f"{name}.out"].view_as(side))
        return {name: host(outputs[name]) for name in graph.results}

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
        return StepResult(out.logits_RV.float().numpy(), out.choice_R.numpy(), out.features_RF.float().numpy())


def host(value: torch.Tensor) -> NDArray:
    """A graph's output in the host's memory: whole numbers as they are, all else as fp32."""
    return (value.float() if value.is_floating_point() else value).cpu().numpy()


def _onnx_weights(bundle: Bundle) -> dict[str, torch.Tensor]:
    graphs = bundle.manifest.graph_set("onnx")
    if graphs is None:
        raise BundleError(f"{bundle.folder}: holds no ONNX graphs and no fp32 weights; build it with --target onnx,ge")
    return map_tensors(bundle.folder / graphs.weights)


def npu_weights(bundle: Bundle) -> dict[str, torch.Tensor]:
    """Views of the weights of the NPU's graphs; BundleError where the bundle has no such graphs or no weights."""
    npu = bundle.manifest.graph_set("ge")
    if npu is None:
        raise BundleError(f"{bundle.folder}: holds no NPU graphs; build it with --target onnx,ge")
    index = bundle.folder / (npu.index or "")
    return map_npu_weights(index.parent, read_index(index))
