"""Acceptance on the device: what a verify step leaves stays there, and the host learns the accepted path.

The graph says which of its draws are sure. Where one of the path's is not, the host walks the tree itself and draws
that row from its logits, the one row that is then read back. So the text is the host's to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from draftwood.errors import BundleError
from draftwood.manifest import GraphSignature
from draftwood.noise import keys_of
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.engines.executor import Executor
from draftwood.runtime.engines.sessions import allocate, fixed
from draftwood.runtime.speculation.draft_cache import DeviceRows
from draftwood.runtime.speculation.kv_cache import Buffer, KvCache
from draftwood.runtime.speculation.sampling import Sampling, draw
from draftwood.runtime.speculation.sequence import SequenceState
from draftwood.runtime.speculation.step import Draft
from draftwood.trees import Accepted, TreeBuffers, walk

# T rows of a graph, V vocabulary, F features

# What a verify step leaves on the device, and what else of a step may lie there.
KEPT = ("logits", "features")
STAYS = (*KEPT, "features.out", "features.in")
# No mass reaches it, so top-p is off.
_ALL_MASS = 2.0


class Acceptance:
    """The accept graphs of a bundle, and the buffers that they read; not for several threads at once."""

    def __init__(self, bundle: Bundle, graphs: Sequence[GraphSignature], executor: Executor) -> None:
        self._bundle, self._executor = bundle, executor
        accepts = [graph for graph in graphs if graph.kind == "accept"]
        self._graphs = {(graph.rows, _draws(graph)): graph for graph in accepts}
        self._inputs: dict[str, dict[str, NDArray]] = {}
        self._kept: dict[int, dict[str, Buffer]] = {}
        # Rows that were not sure, and that the host has drawn.
        self.host_draws = 0

    @property
    def there(self) -> bool:
        """Whether the bundle's graphs accept; a target may leave it to the host."""
        return bool(self._graphs)

    def kept(self, graph: GraphSignature) -> dict[str, Buffer]:
        """Where a verify or decode graph leaves what stays on the device, by output."""
        if graph.rows not in self._kept:
            specs = {spec.name: spec for spec in graph.outputs if spec.name in KEPT}
            self._kept[graph.rows] = {name: self._executor.zeros(fixed(spec)) for name, spec in specs.items()}
        return self._kept[graph.rows]

    def next_rows(self, state: SequenceState, graph: GraphSignature) -> dict[str, Buffer]:
        """Where a graph leaves the features that the next draft reads, by output."""
        rows = next((spec.shape[0] for spec in graph.outputs if spec.name == "features.out"), None)
        if rows is None:
            return {}
        assert state.draft is not None, "features are kept for a drafter"
        return {"features.out": state.draft.next_rows(int(rows))}

    def accept(
        self, state: SequenceState, draft: Draft, verified: GraphSignature
    ) -> tuple[Accepted, NDArray[np.float32] | DeviceRows | None]:
        """What was accepted of a draft that ``verified`` has run, and the features of the path's rows, or its last.

        Raises:
            NumericError: the teacher's logits are no numbers.
        """
        graph, kept = self._graph(verified.rows, state.sampling), self.kept(verified)
        inputs, rows = self._filled(graph, state, draft), self.next_rows(state, graph)
        buffers = (kept if rows else {"logits": kept["logits"]}) | rows
        return self.chosen(state, draft, self._executor.run(graph, inputs, buffers), buffers)

    def chosen(
        self, state: SequenceState, draft: Draft, outputs: dict[str, NDArray], buffers: dict[str, Buffer]
    ) -> tuple[Accepted, NDArray[np.float32] | DeviceRows | None]:
        """The same of what a graph has given, and left in buffers."""
        count = int(outputs["length"][0])
        path, sure_T = outputs["path"][:count].tolist(), outputs["sure"]
        accepted = self._walked(state, draft, buffers["logits"], outputs["drawn"], sure_T, path)
        kept = buffers.get("features.out")
        if kept is None:
            return accepted, None
        if list(accepted.rows) != path:
            return accepted, self._executor.read(buffers["features"])[list(accepted.rows)]
        return accepted, DeviceRows(kept, min(count, int(kept.shape[0])), self._executor.read)

    def _walked(
        self,
        state: SequenceState,
        draft: Draft,
        logits_TV: Buffer,
        drawn_T: NDArray[np.int64],
        sure_T: NDArray[np.bool_],
        path: list[int],
    ) -> Accepted:
        """The graph's path where all its rows are sure, else the host's own."""
        if sure_T[path].all():
            return Accepted(tuple(path), int(drawn_T[path[-1]]), tuple(draft.tree.ranks[path[1:]].tolist()))

        def drawn(row: int, depth: int) -> int:
            if sure_T[row]:
                return int(drawn_T[row])
            self.host_draws += 1
            return draw(self._executor.read(logits_TV[row]), state.sampling, state.length + depth + 1)

        return walk(draft.tree, draft.tokens_T, drawn)

    def _graph(self, rows: int, sampling: Sampling) -> GraphSignature:
        draws = draws_of(sampling)
        if (rows, draws) not in self._graphs:
            raise BundleError(f"{self._bundle.folder}: no graph accepts {rows} rows; build the bundle again")
        return self._graphs[rows, draws]

    def _filled(self, graph: GraphSignature, state: SequenceState, draft: Draft) -> dict[str, NDArray]:
        if graph.name not in self._inputs:
            held = ("logits", "features")
            self._inputs[graph.name] = {s.name: allocate(s) for s in graph.inputs if s.name not in held}
        inputs = self._inputs[graph.name]
        fill_tree(inputs, draft.tokens_T, draft.tree)
        rows = draft.tree.rows
        inputs["parents"][:rows], inputs["parents"][rows:] = draft.tree.parents, 0
        if "keys" in inputs:
            fill_settings(inputs, state.sampling, state.length + 1, self._bundle.manifest.dims.vocabulary)
        return inputs


def draws_of(sampling: Sampling) -> str:
    """Which of a bundle's graphs draw so."""
    return "greedy" if sampling.greedy else "sampled"


def fill_commit(inputs: dict[str, NDArray], kv: KvCache) -> None:
    """What a step commits before its own rows: the text's length, and the rows of the branch that are moved."""
    moved = len(kv.moved)
    inputs["committed"][0] = kv.length
    inputs["accepted"][0] = moved
    # Slots past the moved rows repeat the last: any valid row will do, they are written to the spare slot.
    inputs["path"][:] = kv.moved[-1] if moved else 0
    inputs["path"][:moved] = kv.moved


def fill_tree(inputs: dict[str, NDArray], tokens_T: NDArray[np.int64], tree: TreeBuffers) -> None:
    """The tree's rows into a graph's inputs; a padded row repeats the root's token and place, and sees itself."""
    rows = tree.rows
    inputs["tokens"][:rows], inputs["tokens"][rows:] = tokens_T, tokens_T[0]
    inputs["depths"][:rows], inputs["depths"][rows:] = tree.depths, 0
    visible = inputs["visible"]
    visible[:] = np.eye(len(visible), dtype=np.bool_)
    visible[:rows, :rows] = tree.mask


def fill_settings(inputs: dict[str, NDArray], sampling: Sampling, position: int, vocabulary: int) -> None:
    """How a graph draws at ``position`` and behind it: ``keys``, ``temperature``, ``top_k`` and ``top_p``."""
    keys = inputs["keys"]
    for part, numbers in zip(keys, keys_of(sampling.seed, range(position, position + keys.shape[-1])), strict=True):
        part[:] = numbers[..., 0]
    inputs["temperature"][0] = sampling.temperature
    inputs["top_k"][0] = sampling.top_k if 0 < sampling.top_k < vocabulary else vocabulary
    inputs["top_p"][0] = sampling.top_p if sampling.top_p < 1 else _ALL_MASS


def _draws(graph: GraphSignature) -> str:
    return "sampled" if any(spec.name == "keys" for spec in graph.inputs) else "greedy"
