"""The reference engine: eager PyTorch over a bundle's own weights, with the same interface as the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from draftwood.compiler.steps.teacher import branch_shape
from draftwood.compiler.targets.bundled import (
    bundle_drafts,
    bundle_modules,
    onnx_weights,
    required_set,
    whole_npu_weights,
    with_own_tables,
)
from draftwood.compiler.targets.online import host
from draftwood.manifest import GraphSignature
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.engines.opening import USUAL, Opening
from draftwood.runtime.speculation.deferred_cache import Branch, DeferredKvCache
from draftwood.runtime.speculation.kv_cache import Zeros
from draftwood.runtime.speculation.sequence import SequenceState
from draftwood.runtime.speculation.step import Draft, TeacherOutput
from draftwood.tools.reference.invariants import Held


class EagerEngine(Held):
    """Runs every step with plain PyTorch attention and no graph; slow, and independent of any lowering.

    In fp32 over the weights of the ONNX graphs. With ``npu``, or if there are none, in the type and over the weights of
    the NPU's. Every step is held to its invariants.
    """

    def __init__(self, bundle: Bundle, opening: Opening = USUAL, npu: bool = False) -> None:
        manifest = bundle.manifest
        npu = npu or manifest.graph_set("onnx") is None
        graphs = required_set(bundle.folder, manifest, "ge" if npu else "onnx")
        # In fp32 the drafts of any size: they need no padding.
        super().__init__(bundle, [graph for graph in graphs.graphs if npu or not graph.slots], self._run_draft)
        weights = whole_npu_weights(bundle.folder, manifest) if npu else onnx_weights(bundle.folder, manifest)
        self.decoder, self.drafter = bundle_modules(manifest, with_own_tables(manifest, weights))
        self.dtype = weights["norm.weight"].dtype
        self.draft_steps = bundle_drafts(bundle.folder, manifest, graphs, (self.decoder, self.drafter))

    @property
    def zeros(self) -> Zeros:
        return lambda shape: torch.zeros(shape, dtype=self.dtype)

    def new_kv(self, slots: int) -> Any:
        manifest, config = self.bundle.manifest, self.decoder.config
        form = Branch(lambda rows: branch_shape(config, rows), manifest.dims.branch_rows, padded=False)
        return DeferredKvCache(manifest.teacher.buffers, slots, form, self.zeros)

    def chunk(self, state: SequenceState, left: int) -> int:
        return left

    def append(self, state: SequenceState, chunk_n: NDArray[np.int64]) -> TeacherOutput:
        order = np.arange(len(chunk_n))
        output = self._run(state.kv, chunk_n, order, order[None] <= order[:, None])
        state.extended(chunk_n, output.features_RF)
        return output

    def verify(self, states: Sequence[SequenceState], drafts: Sequence[Draft]) -> list[TeacherOutput]:
        (state,), (draft,) = states, drafts
        branch = state.kv.next_branch(draft.tree.rows)
        return [self._run(state.kv, draft.tokens_T, draft.tree.depths, draft.tree.mask, branch)]

    @torch.inference_mode()
    def _run_draft(
        self, graph: GraphSignature, inputs: dict[str, NDArray], buffers: dict[str, Any]
    ) -> dict[str, NDArray]:
        module: Any = self.draft_steps[graph.name].module
        if hasattr(module, "form"):
            module.form = "eager"
        small = [spec.name for spec in graph.inputs if spec.name not in graph.caches]
        arguments = [torch.from_numpy(inputs[name]) if name in inputs else buffers[name] for name in small]
        values = [value.to(self.dtype) if value.is_floating_point() else value for value in arguments]
        results = module(*values, *(buffers[name].flatten(0, 1) for name in graph.caches))
        outputs = {spec.name: value for spec, value in zip(graph.outputs, results, strict=True)}
        for name in graph.caches:
            buffers[name].copy_(outputs[f"{name}.out"].view_as(buffers[name]))
        return {name: host(outputs[name]) for name in graph.results}

    @torch.inference_mode()
    def _run(
        self,
        kv: DeferredKvCache,
        tokens_T: NDArray[np.int64],
        depths_T: NDArray[np.int64],
        visible_TT: NDArray[np.bool_],
        branch: torch.Tensor | None = None,
    ) -> TeacherOutput:
        out = self.decoder.step(
            torch.tensor(tokens_T),
            torch.tensor(depths_T),
            torch.tensor(visible_TT),
            torch.tensor([kv.length]),
            torch.tensor([len(kv.moved)]),
            torch.tensor(kv.moved, dtype=torch.int64),
            kv.branch,
            [buffer.flatten(0, 1) for buffer in kv.buffers],
            form="eager",
        )
        for buffer, written in zip(kv.buffers, out.caches, strict=True):
            buffer.copy_(written.view_as(buffer))
        if branch is not None:
            branch.copy_(out.branch_L2TKD)
        return TeacherOutput(out.logits_RV.float().numpy(), out.choice_R.numpy(), out.features_RF.float().numpy())
