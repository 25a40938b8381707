"""A whole step in one launch, for bundles that have graphs for it: the host names root and path, and learns the next.

Branch, caches, logits and features stay on the device. Acceptance ends on the host as ever
(`draftwood.runtime.engines.acceptance`): where a draw of the path is not sure, it draws that row itself.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from draftwood.manifest import Gear, GraphSignature, TensorSignature, whole_name
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.engines.acceptance import Acceptance, draws_of, fill_commit, fill_settings
from draftwood.runtime.engines.executor import Executor
from draftwood.runtime.engines.sessions import NUMPY, fixed
from draftwood.runtime.speculation.drafting import Drafting
from draftwood.runtime.speculation.kv_cache import Buffer
from draftwood.runtime.speculation.sequence import SequenceState
from draftwood.runtime.speculation.step import StepOutcome, StepTimes, outcome


class WholeSteps:
    """The graphs of whole steps, and the small inputs that they read; not for several threads at once."""

    def __init__(
        self,
        bundle: Bundle,
        graphs: Sequence[GraphSignature],
        executor: Executor,
        drafting: Drafting,
        acceptance: Acceptance,
    ) -> None:
        self._graphs = {graph.name: graph for graph in graphs if graph.kind == "whole"}
        self._bundle, self._executor = bundle, executor
        self._drafting, self._acceptance = drafting, acceptance
        self._inputs: dict[str, dict[str, NDArray]] = {}

    @property
    def there(self) -> bool:
        """Whether the bundle has such graphs."""
        return bool(self._graphs)

    def graph(self, state: SequenceState, gear: Gear) -> GraphSignature | None:
        """What does a gear's step for a text in one launch; None where its parts have to."""
        found = self._graphs.get(whole_name(gear.name, draws_of(state.sampling)))
        return found if found is not None and found.slots == state.slots else None

    def step(self, state: SequenceState, gear: Gear, graph: GraphSignature) -> StepOutcome:
        """One step; its launch counts as verify.

        Raises:
            NumericError: the teacher's logits are no numbers.
        """
        began = time.perf_counter_ns()
        inputs, buffers = self._given(state, gear, graph)
        outputs = self._executor.run(graph, inputs, buffers)
        ran = time.perf_counter_ns()
        draft = self._drafting.tree(gear, state.root, outputs)
        if gear.draft and state.draft:
            state.draft.drafted(state.root)
        state.branched(draft.tokens_T)
        outputs |= {"path": outputs["path.out"]}
        accepted, features = self._acceptance.chosen(state, draft, outputs, buffers)
        state.commit(accepted.rows, accepted.bonus, features)
        done = time.perf_counter_ns()
        return outcome(draft, accepted, StepTimes(0.0, (ran - began) / 1e3, (done - ran) / 1e3))

    def _given(
        self, state: SequenceState, gear: Gear, graph: GraphSignature
    ) -> tuple[dict[str, NDArray], dict[str, Buffer]]:
        """Small inputs, and what lies on the device."""
        inputs, kv = self._small(graph), state.kv
        buffers = {"branch": kv.branch, "branch.out": kv.next_branch(kv.padded), **self._acceptance.kept(graph)}
        caches = kv.buffers
        inputs["root"][0] = state.root
        if gear.draft:
            inputs, waiting = self._waiting(state, inputs)
            buffers, caches = buffers | waiting, [*state.draft.buffers, *caches] if state.draft else caches
        fill_commit(inputs, kv)
        if "keys" in inputs:
            fill_settings(inputs, state.sampling, state.length + 1, self._bundle.manifest.dims.vocabulary)
        return inputs, buffers | self._acceptance.next_rows(state, graph) | dict(zip(graph.caches, caches, strict=True))

    def _waiting(
        self, state: SequenceState, inputs: dict[str, NDArray]
    ) -> tuple[dict[str, NDArray], dict[str, Buffer]]:
        """The rows that the drafter has not seen; their features are taken from the device where they lie there."""
        cache = state.draft
        assert cache is not None, "a gear that drafts belongs to a bundle with a drafter"
        self._drafting.settle(state, len(inputs["features.in"]))
        cache.reserve(state.slots)
        count, kept = cache.waiting, cache.on_device
        if "tokens" in inputs:
            inputs["tokens"][:count], inputs["waiting"][0] = cache.after(count, state.root), count
        if kept is None:
            inputs["features.in"][:count] = cache.features(count)
            return inputs, {}
        return {name: array for name, array in inputs.items() if name != "features.in"}, {"features.in": kept}

    def _small(self, graph: GraphSignature) -> dict[str, NDArray]:
        if graph.name not in self._inputs:
            held = {"branch", *graph.caches}
            self._inputs[graph.name] = {spec.name: _zeros(spec) for spec in graph.inputs if spec.name not in held}
        return self._inputs[graph.name]


def _zeros(spec: TensorSignature) -> NDArray:
    """Zeros of the declared shape; floating-point inputs are fp32 here, whatever the graph computes in."""
    return np.zeros(fixed(spec), NUMPY.get(spec.dtype, np.float32))
