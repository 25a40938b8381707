"""The engine that decodes on a CPU: graphs with run-time sizes serve prefill, decode and every tree.

One is for many rows of a text. The others have query heads as rows, for few rows of a text or of several, which share
the products with the weights. A launch takes the smallest that has room for its texts; a place that is left over
computes one row, which nobody reads. A row has the same bits in each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftwood.errors import InvariantError
from draftwood.manifest import Gear, GraphSignature, text_name
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.engines.engine import Engine
from draftwood.runtime.engines.opening import USUAL, Opening
from draftwood.runtime.engines.sessions import Bindings, OnnxExecutor, SessionBindings, session
from draftwood.runtime.engines.turns import Turns
from draftwood.runtime.speculation.kv_cache import KvCache
from draftwood.runtime.speculation.sequence import SequenceState
from draftwood.runtime.speculation.step import Draft, TeacherOutput

# T new rows of a text, A rows in attention, S = slots seen, R rows with logits, F features, N query heads, K key/value
# heads, G = N / K, E = 3 K heads of a row in attention that has query heads as rows

PREFILL_ROWS = 256  # tokens of a prefill step: past that a larger one is no faster
# Query heads as rows are faster for few rows, and for more of a long text: docs/results/speed.md.
FEW_ROWS, TOKENS_A_ROW = 4, 128
PROBED = 4  # tokens of a text by which it is found out what a row's bits depend on
# onnxruntime's attention takes rows in blocks of twice a head's width, or fewer if a cache is small, but never of less
# than this. A last block of one row is summed in another order than rows that stand together.
LEAST_BLOCK = 16
MASKED = np.float32(-1e38)  # finite: added to any score it stays a number, and its exponential is zero


class TextRows(NamedTuple):
    """One text's part of a launch; ``mask_TT`` None is causal order. Logits are computed of ``rows_R``."""

    kv: KvCache
    tokens_T: NDArray[np.int64]
    depths_T: NDArray[np.int64]
    rows_R: NDArray[np.int64]
    mask_TT: NDArray[np.bool_] | None


class Before(NamedTuple):
    """Rows of the texts that come first in a launch: of all, and in their attentions."""

    rows: int = 0
    attended: int = 0

    def past(self, line: TextRows, group: int) -> Before:
        rows = len(line.tokens_T)
        return Before(self.rows + rows, self.attended + attended(rows * group))


class Places(NamedTuple):
    """A text's rows in attention with query heads as rows: ``row_A`` are the text's, the other fields the graph's
    inputs. Heads stand side by side, each with all rows; the first has the keys and values that the cache keeps."""

    row_A: NDArray[np.int64]
    queries_1AE2: NDArray[np.int64]
    results_TN3: NDArray[np.int64]


@lru_cache(maxsize=1024)
def places(rows: int, kv_heads: int, group: int, before: Before) -> Places:
    """The places of so many rows after those ``before`` them."""
    head_A, row_A = np.divmod(np.minimum(np.arange(attended(rows * group)), rows * group - 1), rows)
    key_K, heads = np.arange(kv_heads), kv_heads * group
    keys_AK, values_AK = (np.broadcast_to(heads + at + key_K, (len(row_A), kv_heads)) for at in (0, kv_heads))
    head_AE = np.concatenate((key_K * group + head_A[:, None], keys_AK, values_AK), 1)
    queries_AE2 = np.stack((np.broadcast_to(before.rows + row_A[:, None], head_AE.shape), head_AE), -1)
    results_TN3 = np.zeros((rows, heads, 3), np.int64)
    key_N, group_N = np.divmod(np.arange(heads), group)
    results_TN3[..., 1] = before.attended + group_N * rows + np.arange(rows)[:, None]
    results_TN3[..., 2] = key_N
    return Places(row_A, queries_AE2[None], results_TN3)


def attended(rows: int) -> int:
    """A: how many stand together in the attention of so many rows, so that none is summed alone."""
    return rows + (rows == 1 or (rows > LEAST_BLOCK and rows % 2 == 1))


class CpuEngine(Engine):
    """One copy of the weights, whatever the number of gears; as many texts a step as the bundle has graphs for."""

    graph_name = "step"
    keeps = True
    prefill_rows = PREFILL_ROWS

    def __init__(self, bundle: Bundle, opening: Opening = USUAL) -> None:
        dims = bundle.manifest.dims
        self._graph = graph = bundle.graph(self.graph_name)
        self._threads = opening.threads
        graphs = [each for each in bundle.manifest.graphs_of("onnx") if not each.slots]
        # By texts, with query heads as rows; those for several are opened when they are first needed.
        self._batches = {1: graph if self.bitwise else bundle.graph("grouped")}
        self._batches |= {each.batch: each for each in graphs if each.kind == "batch" and not self.bitwise}
        self._kv_heads = bundle.manifest.teacher.buffers[0].heads
        self._group = 1 if self.bitwise else dims.heads // self._kv_heads
        self._tail = attended(self._group * max(FEW_ROWS, dims.branch_rows + 1))
        self._opened: dict[str, Bindings] = {}
        self._opening = Turns()
        self.max_batch, self.batches = max(self._batches), tuple(sorted(self._batches))[1:]
        self._drafts = OnnxExecutor(bundle, opening.threads)
        super().__init__(bundle, graphs, self._drafts.run)
        # All of them now: a text should not wait for what its first draft would open.
        drafts = [each for each in graphs if each.kind in ("draft", "extend")]
        steps = [graph, self._batches[1]] if self._group > 1 else [graph]
        with ThreadPoolExecutor(2, "draftwood-opening") as apart:  # each opening takes one processor
            drafting = apart.submit(lambda: [self._drafts.open(each) for each in drafts])
            opened = {each.name: apart.submit(self._new_bindings, each) for each in steps}
        drafting.result()
        self._opened |= {name: each.result() for name, each in opened.items()}
        rows = (dims.branch_rows + 1) * self.max_batch
        self._logits_RV = np.zeros((rows, dims.vocabulary), np.float32)
        self._choice_R = np.zeros(rows, np.int64)
        # A drafter that reads states inside the teacher needs those of every row, even if logits of one row are enough.
        size, width = next(spec.shape for spec in graph.outputs if spec.name == "features")
        self._all_rows = size == "T"
        most = max(rows, self.prefill_rows + 1)
        self._features = np.zeros((most if self._all_rows else rows, int(width)), np.float32)
        # Names in a graph, by the text's place in a launch: of its caches, and of its inputs.
        caches, places = [rows.name for rows in bundle.manifest.teacher.buffers], ("", *map(str, range(self.max_batch)))
        inputs = [spec.name for spec in graph.inputs]
        self._caches = {place: [text_name(place, name) for name in caches] for place in places}
        self._names = {place: {name: text_name(place, name) for name in inputs} for place in places}
        self._order = np.arange(most, dtype=np.int64)
        self._vacant: TextRows | None = None

    def new_kv(self, slots: int) -> KvCache:
        return KvCache(self.bundle.manifest.teacher.buffers, slots, self._tail)

    def chunk(self, state: SequenceState, left: int) -> int:
        return min(left, self.prefill_rows)

    def launches(self, slots: int) -> tuple[int, ...]:
        return (min(self.prefill_rows, slots - 1),)

    def append(self, state: SequenceState, chunk_n: NDArray[np.int64]) -> TeacherOutput:
        kv, rows = state.kv, len(chunk_n)
        last = self._order[rows - 1 : rows]
        (output,) = self._run([TextRows(kv, chunk_n, self._order[:rows], last, None)])
        state.extended(chunk_n, output.features_RF)
        return output

    def verify(self, states: Sequence[SequenceState], drafts: Sequence[Draft]) -> list[TeacherOutput]:
        lines = [self._line(state.kv, draft) for state, draft in zip(states, drafts, strict=True)]
        return self._run(lines)

    def _line(self, kv: KvCache, draft: Draft) -> TextRows:
        tree, rows_R = draft.tree, self._order[: draft.tree.rows]
        # There the operator counts positions from the first.
        if not kv.length and (tree.depths != rows_R).any():
            raise InvariantError("a tree that branches on an empty text; expected one token before it at least")
        return TextRows(kv, draft.tokens_T, tree.depths, rows_R, tree.mask)

    def _with_company(self, lines: list[TextRows]) -> list[TextRows]:
        """The lines. A single row gets an idle one next to it if products would sum it in another order alone."""
        alone = len(lines) == len(lines[0].tokens_T) == 1
        return [self._with_idle(lines[0])] if alone and self._differs_alone else lines

    def _with_idle(self, line: TextRows) -> TextRows:
        """A row and the same once more after it, which nobody reads; the next launch overwrites it."""
        return line._replace(tokens_T=line.tokens_T.repeat(2), depths_T=self._order[:2], mask_TT=None)

    @cached_property
    def _differs_alone(self) -> bool:
        """Whether products give a row other bits alone than next to another, by a text of a few tokens.

        On processors without AVX-512 onnxruntime's product of four-bit weights sums it in another order.
        """
        if not self.bundle.manifest.packed:
            return False
        kv, rows = self.new_kv(min(gear.slots for gear in self.bundle.manifest.gears)), self._order[:PROBED]
        self._launch([TextRows(kv, rows, rows, rows[:1], None)])
        kv.extended(PROBED)
        line = TextRows(kv, rows[:1], rows[:1], rows[:1], None)
        alone = self._launch([line])[0].logits_RV.copy()
        paired = self._launch([self._with_idle(line)])[0].logits_RV
        return not np.array_equal(alone.view(np.int32), paired.view(np.int32))

    def make_ready(self, states: Sequence[SequenceState], gears: Sequence[Gear]) -> None:
        if len(states) > 1:  # those for one are open
            self._bindings(self._batches[self._size(len(states))])
            for graph, _ in self.drafting.launches(states, gears):
                if graph is not None:
                    self._drafts.open(graph)

    def _size(self, texts: int) -> int:
        """Texts of the smallest graph that has room."""
        return min(size for size in self._batches if size >= texts)

    def _run(self, lines: list[TextRows]) -> list[TeacherOutput]:
        """One launch, whose rows have the bits that they have in any other."""
        if len(lines) > 1 and not all(map(self._groups, lines)):
            return [output.copied() for line in lines for output in self._run([line])]
        outputs = self._launch(self._with_company(lines))
        return [
            output._replace(features_RF=output.features_RF[: len(line.tokens_T)])  # without an idle row
            for output, line in zip(outputs, lines, strict=True)
        ]

    def _groups(self, line: TextRows) -> bool:
        """Whether the operator takes heads as rows. In a text without tokens it counts positions row by row, and it has
        none for rows beyond the context."""
        rows = attended(len(line.tokens_T) * self._group)
        return 0 < line.kv.length <= self.bundle.manifest.dims.context + 1 - rows

    def _graph_for(self, lines: list[TextRows]) -> GraphSignature:
        if len(lines) > 1:
            return self._batches[self._size(len(lines))]
        line, dims = lines[0], self.bundle.manifest.dims
        rows = max(FEW_ROWS, min(dims.branch_rows, line.kv.length // TOKENS_A_ROW))
        faster = self._group > 1 and len(line.tokens_T) <= rows
        return self._batches[1] if faster and self._groups(line) else self._graph

    def _launch(self, lines: list[TextRows]) -> list[TeacherOutput]:
        graph = self._graph_for(lines)
        bind, placed = self._bindings(graph), lines + [self._nobody()] * (graph.batch - len(lines))
        before, grouped = Before(), graph is not self._graph
        for number, line in enumerate(placed):
            self._bind(bind, str(number) if graph.batch > 1 else "", line, before, grouped)
            before = before.past(line, self._group if grouped else 1)
        count = sum(len(line.rows_R) for line in placed)
        features = self._features[: sum(len(line.tokens_T) for line in placed) if self._all_rows else count]
        bind.outputs({"logits": self._logits_RV[:count], "choice": self._choice_R[:count], "features": features})
        bind.run()
        return self._shared_out(lines, features)

    def _shared_out(self, lines: list[TextRows], features: NDArray[np.float32]) -> list[TeacherOutput]:
        """Every text's rows of the outputs."""
        steps, row, feature = [], 0, 0
        for line in lines:
            count, read = len(line.rows_R), len(line.tokens_T) if self._all_rows else len(line.rows_R)
            rows = slice(row, row + count)
            steps.append(TeacherOutput(self._logits_RV[rows], self._choice_R[rows], features[feature : feature + read]))
            row, feature = row + count, feature + read
        return steps

    def _bindings(self, graph: GraphSignature) -> Bindings:
        """A graph, opened."""
        if graph.name not in self._opened:
            with self._opening:
                if graph.name not in self._opened:
                    self._opened[graph.name] = self._new_bindings(graph)
        return self._opened[graph.name]

    def _new_bindings(self, graph: GraphSignature) -> Bindings:
        return SessionBindings(session(self.bundle, graph, self._threads), graph)

    def _nobody(self) -> TextRows:
        """A place that no text has taken."""
        if self._vacant is None:
            kv, single = self.new_kv(2), self._order[:1]
            self._vacant = TextRows(kv, single, single, single[:0], None)
        return self._vacant

    def _bind(self, bind: Bindings, text: str, line: TextRows, before: Before, grouped: bool) -> None:
        """One text's inputs to a launch; its rows are counted after those ``before`` it."""
        inputs = {"rows": before.rows + line.rows_R, "tokens": line.tokens_T}
        inputs |= self._attention(bind, text, line, before, grouped)
        names = self._names[text]
        bind.inputs({names[name]: array for name, array in inputs.items()})

    def _attention(
        self, bind: Bindings, text: str, line: TextRows, before: Before, grouped: bool
    ) -> dict[str, NDArray]:
        """Binds the caches; the inputs that say what the new rows see of them."""
        bind.caches(self._caches[text], line.kv.buffers)
        inputs = self._of_heads(line, before) if grouped else self._of_rows(line, before)
        seen = inputs["bias"].shape[-1]
        return inputs | {"last": np.array([seen - 1], np.int32), "total": np.array(seen, np.int32)}

    def _of_rows(self, line: TextRows, before: Before) -> dict[str, NDArray]:
        """Inputs of the attention of whole rows.

        A row that attention would sum alone occurs twice, the second time at the slot that the next launch writes.
        """
        length, rows = line.kv.length, len(line.tokens_T)
        count = attended(rows)
        bias_AS = np.zeros((count, length + count), np.float32)
        # Columns before the branch are text that every row sees; in it a row sees its path.
        if line.mask_TT is not None:
            bias_AS[:rows, length : length + rows][~line.mask_TT] = MASKED
        results_T2 = np.zeros((rows, 2), np.int64)
        results_T2[:, 1] = before.attended + self._order[:rows]
        positions_A = np.full(count, length + rows, np.int64)
        positions_A[:rows] = length + line.depths_T
        return {
            "queries": before.rows + np.minimum(self._order[None, :count], rows - 1),
            "results": results_T2,
            "positions": positions_A[None],
            "bias": bias_AS[None, None],
        }

    def _of_heads(self, line: TextRows, before: Before) -> dict[str, NDArray]:
        """Inputs of the attention that has query heads as rows. It writes more than the text's own rows; nobody sees
        that."""
        length, rows = line.kv.length, len(line.tokens_T)
        row_A, queries_1AE2, results_TN3 = places(rows, self._kv_heads, self._group, before)
        mask_TT = np.tri(rows, dtype=np.bool_) if line.mask_TT is None else line.mask_TT
        bias_AS = np.zeros((len(row_A), length + len(row_A)), np.float32)
        bias_AS[:, length + rows :] = MASKED
        bias_AS[:, length : length + rows][~mask_TT[row_A]] = MASKED
        return {
            "queries": queries_1AE2,
            "results": results_TN3,
            "positions": (length + line.depths_T[row_A])[None],
            "bias": bias_AS[None, None],
        }
