"""The engine that decodes on a CPU: one graph with run-time sizes serves prefill, decode and every tree.

A bundle may have more such graphs, each for so many texts: those share the products with the weights. A launch takes
the smallest that has room for its texts; a place that is left over computes one row, which nobody reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
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

# T new rows of a text, A of them in attention, S = slots seen, R rows with logits, F features

PREFILL_ROWS = 256  # tokens of a prefill step: past that a larger one is no faster
PROBED = 4  # tokens of a text by which it is found out what a row's bits depend on
# onnxruntime's attention takes rows in blocks of twice a head's width, or fewer where a cache is small, but never of
# less than this; a last block of one row is summed in another order than rows that stand together.
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

    def past(self, line: TextRows) -> Before:
        rows = len(line.tokens_T)
        return Before(self.rows + rows, self.attended + attended(rows))


def attended(rows: int) -> int:
    """A: how many stand together in the attention of so many rows, so that none is summed alone."""
    return rows + (rows == 1 or (rows > LEAST_BLOCK and rows % 2 == 1))


class CpuEngine(Engine):
    """One copy of the weights, whatever the number of gears; as many texts a step as the bundle has graphs for."""

    graph_name = "step"
    keeps = True
    prefill_rows = PREFILL_ROWS

    def __init__(self, bundle: Bundle, opening: Opening = USUAL) -> None:
        dims, graph = bundle.manifest.dims, bundle.graph(self.graph_name)
        self._threads = opening.threads
        graphs = [each for each in bundle.manifest.graphs_of("onnx") if not each.slots]
        # By texts; those for several are opened when they are first needed.
        self._batches = {1: graph} | {each.batch: each for each in graphs if each.kind == "batch" and not self.bitwise}
        self._opened: dict[int, Bindings] = {}
        self._opening = Turns()
        self.max_batch, self.batches = max(self._batches), tuple(sorted(self._batches))[1:]
        self._drafts = OnnxExecutor(bundle, opening.threads)
        super().__init__(bundle, graphs, self._drafts.run)
        # All of them now: a text should not wait for what its first draft would open.
        drafts = [each for each in graphs if each.kind in ("draft", "extend")]
        with ThreadPoolExecutor(1, "draftwood-drafts") as apart:  # each opening takes one processor
            opened = [apart.submit(self._drafts.open, each) for each in drafts]
            self._bindings(1)
        for each in opened:
            each.result()
        rows = (dims.branch_rows + 1) * self.max_batch
        self._logits_RV = np.zeros((rows, dims.vocabulary), np.float32)
        self._choice_R = np.zeros(rows, np.int64)
        # A drafter that reads states inside the teacher needs those of every row, even if logits of one row are enough.
        size, width = next(spec.shape for spec in graph.outputs if spec.name == "features")
        self._all_rows = size == "T"
        most = max(rows, self.prefill_rows + 1)
        self._features = np.zeros((most if self._all_rows else rows, int(width)), np.float32)
        # Of the caches, by the text's name in a launch.
        names = [rows.name for rows in bundle.manifest.teacher.buffers]
        places = ("", *map(str, range(self.max_batch)))
        self._names = {place: [text_name(place, name) for name in names] for place in places}
        self._order = np.arange(most, dtype=np.int64)
        self._vacant: TextRows | None = None

    def new_kv(self, slots: int) -> KvCache:
        return KvCache(self.bundle.manifest.teacher.buffers, slots)

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
            self._bindings(self._size(len(states)))
            for graph, _ in self.drafting.launches(states, gears):
                if graph is not None:
                    self._drafts.open(graph)

    def _size(self, texts: int) -> int:
        """Texts of the smallest graph that has room."""
        return min(size for size in self._batches if size >= texts)

    def _run(self, lines: list[TextRows]) -> list[TeacherOutput]:
        """One launch, whose rows have the bits that they have in any other."""
        outputs = self._launch(self._with_company(lines))
        return [
            output._replace(features_RF=output.features_RF[: len(line.tokens_T)])  # without an idle row
            for output, line in zip(outputs, lines, strict=True)
        ]

    def _launch(self, lines: list[TextRows]) -> list[TeacherOutput]:
        texts = self._size(len(lines))
        bind, placed = self._bindings(texts), lines + [self._nobody()] * (texts - len(lines))
        before = Before()
        for number, line in enumerate(placed):
            self._bind(bind, str(number) if texts > 1 else "", line, before)
            before = before.past(line)
        count = sum(len(line.rows_R) for line in placed)
        features = self._features[: sum(len(line.tokens_T) for line in placed) if self._all_rows else count]
        bind.output("logits", self._logits_RV[:count])
        bind.output("choice", self._choice_R[:count])
        bind.output("features", features)
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

    def _bindings(self, texts: int) -> Bindings:
        """The graph for so many texts, opened."""
        if texts not in self._opened:
            with self._opening:
                if texts not in self._opened:
                    graph: GraphSignature = self._batches[texts]
                    self._opened[texts] = SessionBindings(session(self.bundle, graph, self._threads), graph)
        return self._opened[texts]

    def _nobody(self) -> TextRows:
        """A place that no text has taken."""
        if self._vacant is None:
            kv, single = KvCache(self.bundle.manifest.teacher.buffers, 2), self._order[:1]
            self._vacant = TextRows(kv, single, single, single[:0], None)
        return self._vacant

    def _bind(self, bind: Bindings, text: str, line: TextRows, before: Before) -> None:
        """One text's inputs to a launch; its rows are counted after those ``before`` it."""
        bind.input(text_name(text, "rows"), before.rows + line.rows_R)
        bind.input(text_name(text, "tokens"), line.tokens_T)
        self._bind_attention(bind, text, line, before)

    def _bind_attention(self, bind: Bindings, text: str, line: TextRows, before: Before) -> None:
        """The caches, and what the new rows see of them.

        A row that attention would sum alone occurs twice, the second time at the slot that the next launch writes.
        """
        kv, rows = line.kv, len(line.tokens_T)
        count = attended(rows)
        seen = kv.length + count
        bias_11AS = np.zeros((1, 1, count, seen), np.float32)
        # Columns before the branch are text that every row sees; in it a row sees its path.
        if line.mask_TT is not None:
            bias_11AS[0, 0, :rows, kv.length : kv.length + rows][~line.mask_TT] = MASKED
        results_T2 = np.zeros((rows, 2), np.int64)
        results_T2[:, 1] = before.attended + self._order[:rows]
        queries_1A = before.rows + np.minimum(self._order[None, :count], rows - 1)
        positions_1A = np.full((1, count), kv.length + rows, np.int64)
        positions_1A[0, :rows] = kv.length + line.depths_T
        bind.input(text_name(text, "queries"), queries_1A)
        bind.input(text_name(text, "results"), results_T2)
        bind.input(text_name(text, "positions"), positions_1A)
        bind.input(text_name(text, "bias"), bias_11AS)
        bind.input(text_name(text, "last"), np.array([seen - 1], np.int32))
        bind.input(text_name(text, "total"), np.array(seen, np.int32))
        bind.caches(self._names[text], kv.buffers)
