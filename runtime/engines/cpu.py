"""The engine that decodes on a CPU: one graph with run-time sizes serves prefill, decode and every tree."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from draftwood.manifest import cache_names
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.engines.engine import StagedEngine
from draftwood.runtime.engines.sessions import Bindings, OnnxExecutor, session
from draftwood.runtime.speculation.kv_cache import KvCache
from draftwood.runtime.speculation.sequence import SequenceState
from draftwood.runtime.speculation.step import Draft, TeacherOutput

# T new rows, P moved rows, W = P + T, S = slots seen, R rows with logits, F features

PREFILL_ROWS = 256  # tokens of a prefill step: past that a larger one is no faster
MASKED = np.float32(-1e38)  # finite: added to any score it stays a number, and its exponential is zero


class CpuEngine(StagedEngine):
    """One session, one copy of the weights, whatever the number of gears; one sequence a step."""

    graph_name = "step"
    prefill_rows = PREFILL_ROWS

    def __init__(self, bundle: Bundle, threads: int | None = None) -> None:
        dims, graph = bundle.manifest.dims, bundle.graph(self.graph_name)
        self._bindings = Bindings(session(bundle, graph, threads), graph)
        self._drafts = OnnxExecutor(bundle, threads)
        super().__init__(bundle, bundle.manifest.graphs_of("onnx"), self._drafts.run)
        # All of them now: a text should not wait for what its first draft would open.
        for one in bundle.manifest.graphs_of("onnx"):
            if one.kind in ("draft", "extend"):
                self._drafts.open(one)
        rows = dims.branch_rows
        self._logits_RV = np.zeros((rows, dims.vocabulary), np.float32)
        self._choice_R = np.zeros(rows, np.int64)
        # A drafter that reads states inside the teacher needs those of every row, also where logits of one will do.
        size, width = next(spec.shape for spec in graph.outputs if spec.name == "features")
        self._all_rows = size == "T"
        most = max(rows, self.prefill_rows)
        self._features = np.zeros((most if self._all_rows else rows, int(width)), np.float32)
        self._names = cache_names(dims.layers)
        self._order = np.arange(most, dtype=np.int64)
        self._last = np.zeros(1, np.int32)
        self._total = np.zeros((), np.int32)
        # onnxruntime's attention sums one row in another order than several. Where rows are rounded to int8 a last bit
        # can become a whole step, so that plain decoding runs a second row, which nobody reads.
        self._paired = bundle.manifest.quantised and not self.bitwise
        # The branch of a prefill or a pair is not used: its rows are contiguous. It still has to be written somewhere.
        self._unused = np.zeros(dims.layers * 2 * self.prefill_rows * dims.kv_heads * dims.head_dim, np.float32)

    def new_kv(self, slots: int) -> KvCache:
        return KvCache(self.bundle.manifest.dims, slots)

    def chunk(self, state: SequenceState, left: int) -> int:
        return min(left, self.prefill_rows)

    def launches(self, slots: int) -> tuple[int, ...]:
        return (min(self.prefill_rows, slots - 1),)

    def append(self, state: SequenceState, chunk_n: NDArray[np.int64]) -> TeacherOutput:
        kv, rows = state.kv, len(chunk_n)
        branch = self._unused_branch(kv, rows)
        output = self._run(kv, chunk_n, self._order[:rows], self._order[rows - 1 : rows], None, branch)
        state.extended(chunk_n, output.features_RF)
        return output

    def verify(self, states: Sequence[SequenceState], drafts: Sequence[Draft]) -> list[TeacherOutput]:
        (state,), (draft,) = states, drafts
        kv, tokens_T, tree = state.kv, draft.tokens_T, draft.tree
        if tree.rows == 1 and self._paired:
            branch = self._unused_branch(kv, 2)
            output = self._run(kv, tokens_T.repeat(2), self._order[:2], self._order[:1], None, branch)
            return [output._replace(features_RF=output.features_RF[:1])]  # without the idle row
        branch = kv.next_branch(tree.rows)
        return [self._run(kv, tokens_T, tree.depths, self._order[: tree.rows], tree.mask, branch)]

    def _unused_branch(self, kv: KvCache, rows: int) -> NDArray[np.float32]:
        shape = (*kv.branch.shape[:2], rows, *kv.branch.shape[3:])
        return self._unused[: int(np.prod(shape))].reshape(shape)

    def _run(
        self,
        kv: KvCache,
        tokens_T: NDArray[np.int64],
        depths_T: NDArray[np.int64],
        rows_R: NDArray[np.int64],
        mask_TT: NDArray[np.bool_] | None,
        branch: NDArray[np.float32],
    ) -> TeacherOutput:
        """One launch; ``mask_TT`` None is causal order."""
        bind, count = self._bindings, len(rows_R)
        bind.input("tokens", tokens_T)
        bind.input("positions", kv.length + depths_T)
        bind.input("rows", rows_R)
        bind.input("path", np.array(kv.moved, np.int64))
        bind.input("branch", kv.branch)
        self._bind_attention(kv, depths_T, mask_TT)
        features = self._features[: len(tokens_T) if self._all_rows else count]
        bind.output("logits", self._logits_RV[:count])
        bind.output("choice", self._choice_R[:count])
        bind.output("features", features)
        bind.output("branch.out", branch)
        bind.run()
        return TeacherOutput(self._logits_RV[:count], self._choice_R[:count], features)

    def _bind_attention(self, kv: KvCache, depths_T: NDArray[np.int64], mask_TT: NDArray[np.bool_] | None) -> None:
        """The caches, and what the new rows see of them."""
        bind, moved, rows = self._bindings, len(kv.moved), len(depths_T)
        seen = kv.length + rows
        bias_11WS = np.zeros((1, 1, moved + rows, seen), np.float32)
        if mask_TT is not None:  # columns before the branch are text that every row sees; inside it a row sees its path
            bias_11WS[0, 0, moved:, kv.length :][~mask_TT] = MASKED
        self._total[...], self._last[0] = seen, seen - 1
        bind.input("bias", bias_11WS)
        bind.input("last", self._last)
        bind.input("total", self._total)
        for name, buffer in zip(self._names, kv.buffers, strict=True):
            bind.cache(name, buffer)
