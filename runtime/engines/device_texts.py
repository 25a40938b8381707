"""Verification and acceptance of several texts in one launch each, for bundles that have graphs for it.

Texts of one launch have neighbouring places of one pool. A line of the graph without a text in the launch computes rows
that nobody reads; they are written to the place's spare slot.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftwood.contract import ACCEPTED, COMMITTED, lives
from draftwood.manifest import GraphSignature, text_name
from draftwood.runtime.engines.executor import Executor
from draftwood.runtime.engines.inputs import branches, fill_commit, fill_settings, fill_tree, fill_walk, host_inputs
from draftwood.runtime.engines.sessions import fixed
from draftwood.runtime.speculation.kv_cache import Buffer
from draftwood.runtime.speculation.sequence import SequenceState
from draftwood.runtime.speculation.step import Draft

# B lines of a graph, T rows of each, P places of a path, L levels of keys

NOBODY = -1  # as ``accepted``: a line whose rows go to the spare slot


class GraphLine(NamedTuple):
    """A text's part of a launch: its line of the graph, and what it hands in."""

    number: int
    state: SequenceState
    draft: Draft


class Launched(NamedTuple):
    """A launch of several texts: what it has left on the device, for its lines."""

    graph: GraphSignature
    buffers: dict[str, Buffer]
    lines: list[GraphLine]


class Said(NamedTuple):
    """The result of an accept launch for one line, and the place of the features of the path's rows, if any."""

    outputs: dict[str, NDArray]
    features: Buffer | None


class DeviceTexts:
    """The graphs of several texts, with the buffers that they share; not for several threads at once."""

    def __init__(self, graphs: Sequence[GraphSignature], executor: Executor, vocabulary: int) -> None:
        self._executor, self._vocabulary = executor, vocabulary
        verifies = [graph for graph in graphs if graph.kind == "texts"]
        self._verifies = sorted(verifies, key=lambda graph: (graph.batch, graph.rows))
        self._accepts = {(g.batch, g.rows, _draws(g)): g for g in graphs if g.kind == "accept-texts"}
        self._inputs: dict[str, dict[str, NDArray]] = {}
        self._kept: dict[tuple[int, int, int], dict[str, Buffer]] = {}
        self._scratch: dict[tuple[str, tuple[int, ...]], Buffer] = {}
        self.sizes = tuple(sorted({graph.batch for graph in verifies}))
        self.most = max(self.sizes, default=1)

    def groups(self, states: Sequence[SequenceState]) -> Iterator[list[int]]:
        """Which of the texts go into one launch: those of one pool."""
        pools: dict[Any, list[int]] = {}
        for number, state in enumerate(states):
            pools.setdefault(state.kv.place.pool, []).append(number)
        yield from pools.values()

    def verify(self, states: Sequence[SequenceState], drafts: Sequence[Draft], group: int = 0) -> Launched:
        """One launch of all texts, which have one pool; logits and features stay on the device, those of other groups
        of a step besides them."""
        numbers = [state.kv.place.number for state in states]
        span, rows = max(numbers) - min(numbers) + 1, max(draft.tree.rows for draft in drafts)
        pool = states[0].kv.place.pool
        graph = next(g for g in self._verifies if g.slots == pool.slots and g.batch >= span and g.rows >= rows)
        first = min(min(numbers), self.most - graph.batch)
        lines = [GraphLine(n - first, *pair) for n, pair in zip(numbers, zip(states, drafts, strict=True), strict=True)]
        launched = Launched(graph, self._kept_of(graph, group), lines)
        caches = dict(zip(graph.caches, pool.window(first, graph.batch), strict=True))
        self._executor.run(graph, self._rows(graph, lines), self._branches(graph, lines) | launched.buffers | caches)
        return launched

    def accept(self, launched: Launched, lines: Sequence[GraphLine], draws: str) -> list[Said]:
        """One launch for lines that draw alike."""
        graph = self._accepts[launched.graph.batch, launched.graph.rows, draws]
        inputs = self._emptied(graph)
        buffers = {name: b for name, b in launched.buffers.items() if any(s.name == name for s in graph.inputs)}
        by_number = {line.number: line for line in lines}
        for number in range(graph.batch):
            if number in by_number:
                self._fill_accept(by_number[number], inputs, graph.batch)
        for spec in graph.outputs:
            if spec.name.endswith("features.out"):
                line = by_number.get(_line_of(spec.name))
                buffers[spec.name] = (
                    _features(line.state, fixed(spec)) if line else self._nobody(spec.name, fixed(spec))
                )
        outputs = self._executor.run(graph, inputs, buffers)
        results = {name: outputs[name].copy() for name in ("drawn", "sure", "path", "length")}
        return [_said(results, buffers, line) for line in lines]

    def _rows(self, graph: GraphSignature, lines: Sequence[GraphLine]) -> dict[str, NDArray]:
        """The small inputs of a verify launch."""
        inputs = self._emptied(graph)
        inputs[COMMITTED][:], inputs[ACCEPTED][:] = 0, NOBODY
        for number in range(graph.batch):
            inputs[text_name(number, "path")][:] = 0
        for line in lines:
            of_text = _of_line(inputs, line.number)
            fill_tree(of_text, line.draft.tokens_T, line.draft.tree)
            fill_commit(of_text | {"path": inputs[text_name(line.number, "path")]}, line.state.kv)
        return inputs

    def _branches(self, graph: GraphSignature, lines: Sequence[GraphLine]) -> dict[str, Buffer]:
        """The buffers from which every line reads the last rows, and into which it writes its own. A line without a
        text has buffers that nobody reads."""
        stays = lives(graph, "sequence")
        specs = [spec for spec in (*graph.inputs, *graph.outputs) if spec.name in stays]
        filled = {spec.name: self._nobody(spec.name, fixed(spec)) for spec in specs}
        for line in lines:
            filled |= branches(graph, line.state.kv, line.number)
        return filled

    def _fill_accept(self, line: GraphLine, inputs: dict[str, NDArray], lines: int) -> None:
        """A line's tree, and how it draws."""
        of_text, state = _of_line(inputs, line.number), line.state
        fill_walk(of_text, line.draft.tokens_T, line.draft.tree)
        if "keys" in inputs:
            levels = inputs["keys"].shape[-1] // lines
            of_text["keys"] = inputs["keys"][..., line.number * levels : (line.number + 1) * levels]
        fill_settings(of_text, state.sampling, state.length + 1, self._vocabulary)

    def _emptied(self, graph: GraphSignature) -> dict[str, NDArray]:
        """The inputs that the host writes, every row its own root; settings that divide by nothing."""
        if graph.name not in self._inputs:
            self._inputs[graph.name] = host_inputs(graph)
        inputs = self._inputs[graph.name]
        inputs["tokens"][:], inputs["depths"][:] = 0, 0
        if "visible" in inputs:
            inputs["visible"][:] = np.eye(graph.rows, dtype=np.bool_)
        if "temperature" in inputs:
            inputs["temperature"][:] = 1.0
        return inputs

    def _kept_of(self, graph: GraphSignature, group: int) -> dict[str, Buffer]:
        """Where a graph leaves logits and features, by output."""
        size = graph.batch, graph.rows, group
        if size not in self._kept:
            left = lives(graph, "device")
            specs = {spec.name: spec for spec in graph.outputs if spec.name in left}
            self._kept[size] = {name: self._executor.zeros(fixed(spec)) for name, spec in specs.items()}
        return self._kept[size]

    def _nobody(self, name: str, shape: tuple[int, ...]) -> Buffer:
        """Memory for an input or output that no other has in a launch. Its contents are never read, or its zeros never
        written. A text that failed may have left NaN in its own memory, which must not reach another's spare slot."""
        if (name, shape) not in self._scratch:
            self._scratch[name, shape] = self._executor.zeros(shape)
        return self._scratch[name, shape]


def _said(results: dict[str, NDArray], buffers: dict[str, Buffer], line: GraphLine) -> Said:
    outputs = {name: np.atleast_1d(value[line.number]) for name, value in results.items()}
    return Said(outputs, buffers.get(text_name(line.number, "features.out")))


def _of_line(inputs: dict[str, NDArray], number: int) -> dict[str, NDArray]:
    """Views of what the inputs say of one line."""
    names = ("tokens", "depths", "visible", "parents", "demands", "start", "paths", "mass", "limit")
    numbers = (COMMITTED, ACCEPTED, "temperature", "free")
    rows = {name: inputs[name][number] for name in names if name in inputs}
    return rows | {name: inputs[name][number : number + 1] for name in numbers if name in inputs}


def _features(state: SequenceState, shape: tuple[int, ...]) -> Buffer:
    assert state.draft is not None, "features are kept for a drafter"
    return state.draft.next_rows(shape[0])


def _line_of(name: str) -> int:
    """The line that an input or output belongs to: `text_name` read back."""
    return int(name.partition(".")[0].removeprefix("text"))


def _draws(graph: GraphSignature) -> str:
    return "sampled" if any(spec.name == "keys" for spec in graph.inputs) else "greedy"
