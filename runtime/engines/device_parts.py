"""The parts of a step whose results stay on the device, for bundles that have graphs for it.

The results of a verify launch stay there, and the host learns the accepted path. If the bundle has graphs of whole
steps, one launch drafts, verifies and accepts. A graph says which of its draws are sure. If a draw on the path is not,
the host walks the tree itself and draws that row from its logits, the only row that is read back. So the text is that
of the host's draws, to the bit. A text under a grammar, a restriction, penalties or min-p is drawn by the host alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

from numpy.typing import NDArray

from draftwood.contract import lives
from draftwood.errors import BundleError
from draftwood.manifest import Gear, GraphSignature, whole_name
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.engines.device_texts import DeviceTexts, Launched
from draftwood.runtime.engines.executor import Executor
from draftwood.runtime.engines.inputs import branches, draws_of, fill_commit, fill_settings, fill_walk, host_inputs
from draftwood.runtime.engines.sessions import fixed
from draftwood.runtime.speculation.draft_cache import DeviceRows
from draftwood.runtime.speculation.drafting import Drafting
from draftwood.runtime.speculation.kv_cache import Buffer
from draftwood.runtime.speculation.sampling import Logits, draw
from draftwood.runtime.speculation.sequence import SequenceState
from draftwood.runtime.speculation.step import Draft, Taken, accept, keep_logprobs
from draftwood.trees import Accepted, walk

# T rows of a graph, V vocabulary, F features

# Runs the tree's rows after the text, and leaves the outputs that the last argument gives buffers for.
Launch = Callable[[GraphSignature, SequenceState, Draft, dict[str, Buffer]], object]


class Left(NamedTuple):
    """The remains of a launch: buffers on the device, and of a whole step what it has accepted."""

    buffers: dict[str, Buffer]
    rows: int
    outputs: dict[str, NDArray] | None = None
    # Of a launch of several texts: the text's first row in the buffers.
    first: int = 0
    launched: Launched | None = None


class DeviceParts:
    """The accept graphs and those of whole steps, with the buffers that they share; not for several threads at once.

    ``apart`` asks for the parts of a step one by one, even if one launch could do them.
    """

    def __init__(
        self,
        bundle: Bundle,
        graphs: Sequence[GraphSignature],
        executor: Executor,
        drafting: Drafting,
        tree_graph: Callable[[int, int], GraphSignature],
        launch: Launch,
    ) -> None:
        self._bundle, self._executor, self._drafting = bundle, executor, drafting
        self._tree_graph, self._launch = tree_graph, launch
        accepts = [graph for graph in graphs if graph.kind == "accept"]
        self._accepts = {(graph.rows, _draws(graph)): graph for graph in accepts}
        self._wholes = {graph.name: graph for graph in graphs if graph.kind == "whole"}
        self._inputs: dict[str, dict[str, NDArray]] = {}
        self._kept: dict[int, dict[str, Buffer]] = {}
        self.texts = DeviceTexts(graphs, executor, bundle.manifest.dims.vocabulary)
        self.apart = False
        # Rows that were not sure, and that the host has drawn.
        self.host_draws = 0

    @property
    def accepts(self) -> bool:
        """Whether the bundle's graphs accept; a target may leave it to the host."""
        return bool(self._accepts)

    @property
    def has_whole(self) -> bool:
        """Whether the bundle has graphs of whole steps."""
        return bool(self._wholes)

    def draft(self, states: Sequence[SequenceState], gears: Sequence[Gear]) -> list[Draft]:
        """For every text a tree of the gear after its root."""
        return self._drafting.drafts(states, gears)

    def verify(self, states: Sequence[SequenceState], drafts: Sequence[Draft]) -> list[Left]:
        """Runs the trees' rows, in one launch for all texts of a pool; logits and features stay where they are."""
        if len(states) > 1:
            return self._verified(states, drafts)
        (state,), (draft,) = states, drafts
        graph = self._tree_graph(draft.tree.rows, state.slots)
        stored = self._kept_of(graph)
        self._launch(graph, state, draft, stored)
        return [Left(stored, graph.rows)]

    def _verified(self, states: Sequence[SequenceState], drafts: Sequence[Draft]) -> list[Left]:
        """Several texts, those of one pool in one launch."""
        left: dict[int, Left] = {}
        for group, numbers in enumerate(self.texts.groups(states)):
            launched = self.texts.verify([states[n] for n in numbers], [drafts[n] for n in numbers], group)
            rows = launched.graph.rows
            for number, line in zip(numbers, launched.lines, strict=True):
                left[number] = Left(launched.buffers, rows, None, line.number * rows, launched)
        return [left[number] for number in range(len(states))]

    def whole(self, states: Sequence[SequenceState], gears: Sequence[Gear]) -> tuple[list[Draft], list[Left]] | None:
        """A step in one launch; None if its parts have launches of their own, as for several texts."""
        if len(states) > 1:
            return None
        (state,), (gear,) = states, gears
        graph = self._wholes.get(whole_name(gear.name, draws_of(state.sampling)))
        # A guided draft needs its noise from the host.
        if self.apart or graph is None or graph.slots != state.slots or state.guide is not None:
            return None
        inputs, buffers = self._given(state, gear, graph)
        outputs = self._executor.run(graph, inputs, buffers)
        draft = self._drafting.tree(gear, state.root, outputs)
        if gear.draft and state.draft:
            state.draft.drafted(state.root)
        return [draft], [Left(buffers, graph.rows, outputs | {"path": outputs["path.out"]})]

    def accept(self, states: Sequence[SequenceState], drafts: Sequence[Draft], verified: Sequence[Left]) -> list[Taken]:
        """The accepted part of a draft, and the features of the path's rows, or its last.

        Raises:
            NumericError: the teacher's logits are no numbers.
        """
        if len(states) == 1 and verified[0].outputs is None:
            verified = [self._accepted(states[0], drafts[0], verified[0])]
        elif len(states) > 1:
            verified = self._accepted_texts(states, verified)
        return [self._taken(*each) for each in zip(states, drafts, verified, strict=True)]

    def _accepted_texts(self, states: Sequence[SequenceState], verified: Sequence[Left]) -> list[Left]:
        """Launches of accept graphs on the results of launches of several texts: one for all texts that draw alike."""
        results = list(verified)
        launches: dict[tuple[int, str], list[int]] = {}
        for number, (state, left) in enumerate(zip(states, verified, strict=True)):
            launches.setdefault((id(left.launched), draws_of(state.sampling)), []).append(number)
        for (_, draws), numbers in launches.items():
            launched = verified[numbers[0]].launched
            assert launched is not None, "several texts are verified by launches of several"
            lines = {id(line.state): line for line in launched.lines}
            accepted = self.texts.accept(launched, [lines[id(states[n])] for n in numbers], draws)
            for number, (outputs, features) in zip(numbers, accepted, strict=True):
                buffers = {} if features is None else {"features.out": features}
                left = verified[number]
                results[number] = left._replace(buffers=left.buffers | buffers, outputs=outputs)
        return results

    def _taken(self, state: SequenceState, draft: Draft, left: Left) -> Taken:
        """The result of a text's acceptance."""
        assert left.outputs is not None
        count = int(left.outputs["length"][0])
        path = left.outputs["path"][:count].tolist()
        accepted = self._walked(state, draft, left, path)
        stored = left.buffers.get("features.out")
        if stored is None:
            return accepted, None
        if list(accepted.rows) != path:
            features = self._executor.read(left.buffers["features"])[left.first :]
            return accepted, features[list(accepted.rows)]
        return accepted, DeviceRows(stored, min(count, int(stored.shape[0])), self._executor.read)

    def _accepted(self, state: SequenceState, draft: Draft, left: Left) -> Left:
        """The launch of an accept graph on what a verify graph has left."""
        draws = draws_of(state.sampling)
        if (left.rows, draws) not in self._accepts:
            raise BundleError(f"{self._bundle.folder}: no graph accepts {left.rows} rows; build the bundle again")
        graph = self._accepts[left.rows, draws]
        inputs = self._small(graph)
        fill_walk(inputs, draft.tokens_T, draft.tree)
        fill_settings(inputs, state.sampling, state.length + 1, self._bundle.manifest.dims.vocabulary)
        next_rows = self._next_rows(state, graph)
        buffers = left.buffers | next_rows if next_rows else {"logits": left.buffers["logits"]}
        return Left(buffers, left.rows, self._executor.run(graph, inputs, buffers))

    def _walked(self, state: SequenceState, draft: Draft, left: Left, path: list[int]) -> Accepted:
        """The graph's path if all its rows are sure, else the host's own."""

        @cache
        def logits_of(row: int) -> Logits:
            return self._executor.read(left.buffers["logits"][left.first + row])

        assert left.outputs is not None
        drawn_T, sure_T = left.outputs["drawn"], left.outputs["sure"]
        if state.drawn_by_host:
            return accept(state, draft, logits_of)
        if sure_T[path].all():
            accepted = Accepted(tuple(path), int(drawn_T[path[-1]]), tuple(draft.tree.ranks[path[1:]].tolist()))
        else:

            def drawn(row: int, depth: int) -> int:
                if sure_T[row]:
                    return int(drawn_T[row])
                self.host_draws += 1
                return draw(logits_of(row), state.sampling, state.length + depth + 1)

            accepted = walk(draft.tree, draft.tokens_T, drawn)
        keep_logprobs(state, draft, accepted, logits_of)
        return accepted

    def _given(
        self, state: SequenceState, gear: Gear, graph: GraphSignature
    ) -> tuple[dict[str, NDArray], dict[str, Buffer]]:
        """Inputs of a whole step: small inputs, and what lies on the device."""
        inputs, kv = self._small(graph), state.kv
        buffers = branches(graph, kv) | self._kept_of(graph)
        caches = kv.buffers
        inputs["root"][0] = state.root
        fill_commit(inputs, kv)
        fill_settings(inputs, state.sampling, state.length + 1, self._bundle.manifest.dims.vocabulary)
        if gear.draft:
            inputs, waiting = self._waiting(state, inputs)
            buffers, caches = buffers | waiting, [*state.draft.buffers, *caches] if state.draft else caches
        return inputs, buffers | self._next_rows(state, graph) | dict(zip(graph.caches, caches, strict=True))

    def _waiting(
        self, state: SequenceState, inputs: dict[str, NDArray]
    ) -> tuple[dict[str, NDArray], dict[str, Buffer]]:
        """The rows that the drafter has not seen; their features are taken from the device if they lie there."""
        cache = state.draft
        assert cache is not None, "a gear that drafts belongs to a bundle with a drafter"
        self._drafting.settle(state, len(inputs["features.in"]))
        cache.reserve(state.slots)
        count, stored = cache.waiting, cache.on_device
        if "tokens" in inputs:
            inputs["tokens"][:count], inputs["waiting"][0] = cache.after(count, state.root), count
        if stored is None:
            inputs["features.in"][:count] = cache.features(count)
            return inputs, {}
        return {name: array for name, array in inputs.items() if name != "features.in"}, {"features.in": stored}

    def _kept_of(self, graph: GraphSignature) -> dict[str, Buffer]:
        """Where a graph leaves logits and features, by output."""
        if graph.rows not in self._kept:
            left = lives(graph, "device")
            specs = {spec.name: spec for spec in graph.outputs if spec.name in left}
            self._kept[graph.rows] = {name: self._executor.zeros(fixed(spec)) for name, spec in specs.items()}
        return self._kept[graph.rows]

    def _next_rows(self, state: SequenceState, graph: GraphSignature) -> dict[str, Buffer]:
        """Where a graph leaves the features that the next draft reads, by output."""
        rows = next((spec.shape[0] for spec in graph.outputs if spec.name == "features.out"), None)
        if rows is None:
            return {}
        assert state.draft is not None, "features are kept for a drafter"
        return {"features.out": state.draft.next_rows(int(rows))}

    def _small(self, graph: GraphSignature) -> dict[str, NDArray]:
        """The inputs that the host writes. In a whole step features may be among them."""
        if graph.name not in self._inputs:
            self._inputs[graph.name] = host_inputs(graph, "either")
        return self._inputs[graph.name]


def _draws(graph: GraphSignature) -> str:
    return "sampled" if any(spec.name == "keys" for spec in graph.inputs) else "greedy"
