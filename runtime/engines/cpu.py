"""The engine that decodes on a CPU: one graph with run-time sizes serves prefill, decode and every tree."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from draftwood.manifest import Gear, cache_names
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.cache import Cache
from draftwood.runtime.drafting import Draft, Drafting
from draftwood.runtime.engine import Bindings, DraftSessions, StepResult, session
from draftwood.trees import TreeBuffers

# T new rows, P moved rows, W = P + T, S = slots seen, R rows with logits, F features

PREFILL_ROWS = 256  # tokens of a prefill step: past that a larger one is no faster
_MASKED = np.float32(-1e38)  # finite: added to any score it stays a number, and its exponential is zero


class CpuEngine:
    """One session, one copy of the weights, whatever the number of gears."""

    def __init__(self, bundle: Bundle, threads: int | None = None) -> None:
        self.bundle = bundle
        dims, graph = bundle.manifest.dims, bundle.graph("step")
        self._bindings = Bindings(session(bundle, graph, threads), graph)
        self._drafting = Drafting(bundle, bundle.manifest.graphs_of("onnx"), DraftSessions(bundle, threads))
        rows = dims.branch_rows
        self._logits_RV = np.zeros((rows, dims.vocabulary), np.float32)
        self._choice_R = np.zeros(rows, np.int64)
        # A drafter that reads states inside the teacher needs those of every row, also where logits of one will do.
        size, width = next(spec.shape for spec in graph.outputs if spec.name == "features")
        self._all_rows = size == "T"
        self._features = np.zeros((max(rows, PREFILL_ROWS) if self._all_rows else rows, int(width)), np.float32)
        self._names = cache_names(dims.layers)
        self._order = np.arange(max(rows, PREFILL_ROWS), dtype=np.int64)
        self._last = np.zeros(1, np.int32)
        self._total = np.zeros((), np.int32)
        # A prefill's branch is not used, its rows being contiguous; it still has to be written somewhere.
        self._unused = np.zeros(dims.layers * 2 * PREFILL_ROWS * dims.kv_heads * dims.head_dim, np.float32)

    def new_cache(self, slots: int) -> Cache:
        return Cache(self.bundle.manifest.dims, slots, drafter=self.bundle.manifest.drafter)

    def prefill(self, cache: Cache, tokens: NDArray[np.int64]) -> StepResult:
        for at in range(0, len(tokens), PREFILL_ROWS):
            chunk = np.ascontiguousarray(tokens[at : at + PREFILL_ROWS], np.int64)
            rows = len(chunk)
            bias = np.zeros((1, 1, len(cache.moved) + rows, cache.length + rows), np.float32)
            shape = (*cache.branch.shape[:2], rows, *cache.branch.shape[3:])
            branch = self._unused[: int(np.prod(shape))].reshape(shape)
            result = self._run(cache, chunk, self._order[:rows], self._order[rows - 1 : rows], bias, branch)
            cache.extended(rows)
            if cache.draft:
                cache.draft.append(chunk, result.features_RF)
                self._drafting.keep_up(cache)
        return result.last()

    def verify(self, cache: Cache, tokens_T: NDArray[np.int64], tree: TreeBuffers) -> StepResult:
        self._drafting.keep_up(cache)
        rows, moved, seen = tree.rows, len(cache.moved), cache.length
        bias = np.zeros((1, 1, moved + rows, seen + rows), np.float32)
        # Columns before the branch are text that every row sees; inside it a row sees its ancestors.
        bias[0, 0, moved:, seen:][~tree.mask] = _MASKED
        branch = cache.next_branch(rows)
        result = self._run(cache, tokens_T, tree.depths, self._order[:rows], bias, branch)
        cache.branched(rows)
        if cache.draft:
            cache.draft.open(tokens_T, result.features_RF)
        return result

    def draft(self, cache: Cache, gear: Gear, root: int) -> Draft:
        return self._drafting.draft(cache, gear, root)

    def _run(
        self,
        cache: Cache,
        tokens_T: NDArray[np.int64],
        depths_T: NDArray[np.int64],
        rows_R: NDArray[np.int64],
        bias_11WS: NDArray[np.float32],
        branch: NDArray[np.float32],
    ) -> StepResult:
        bind, count = self._bindings, len(rows_R)
        self._total[...] = bias_11WS.shape[-1]
        self._last[0] = bias_11WS.shape[-1] - 1
        bind.input("tokens", tokens_T)
        bind.input("positions", cache.length + depths_T)
        bind.input("rows", rows_R)
        bind.input("bias", bias_11WS)
        bind.input("last", self._last)
        bind.input("total", self._total)
        bind.input("path", np.array(cache.moved, np.int64))
        bind.input("branch", cache.branch)
        bind.caches(self._names, cache.sides, (1, *cache.sides[0].shape))
        features = self._features[: len(tokens_T) if self._all_rows else count]
        result = StepResult(self._logits_RV[:count], self._choice_R[:count], features)
        bind.output("logits", result.logits_RV)
        bind.output("choice", result.choice_R)
        bind.output("features", result.features_RF)
        bind.output("branch.out", branch)
        bind.run()
        return result
