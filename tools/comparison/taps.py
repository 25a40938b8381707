"""Shows the states between a graph's blocks: a copy of it in memory gives them as outputs besides its own.

A state is the input of a block's norm, before attention and before the MLP, and before the last norm. The graph is
found by its norms' weights, so that the form of a norm, one node or several, does not matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from draftwood.errors import InvariantError
from draftwood.manifest import GraphSignature
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.engines.bitwise import BitwiseEngine
from draftwood.runtime.engines.cpu import CpuEngine
from draftwood.runtime.engines.engine import Engine
from draftwood.runtime.engines.opening import USUAL, Opening
from draftwood.runtime.engines.sessions import (
    Bindings,
    OnnxExecutor,
    SessionBindings,
    session_options,
    sessions_in_memory,
)
from draftwood.runtime.engines.static import OnnxStaticEngine, StaticEngine
from draftwood.runtime.speculation.sequence import SequenceState
from draftwood.runtime.speculation.step import Draft, TeacherOutput
from draftwood.tools.reference.followed import States

if TYPE_CHECKING:
    import onnx

_FOLDER = "session.model_external_initializers_file_folder_path"
_ADDING = ("Add", "SkipSimplifiedLayerNormalization")
_MOVING = ("Concat", "Gather", "Split")
_KINDS = ("step", "grouped", "batch", "bitwise", "prefill", "decode", "verify")


def norm_names(layers: int) -> list[str]:
    """The weights of the norms that states enter, in the order of a step."""
    halves = ("attn_norm", "mlp_norm")
    return [f"layers.{i}.{half}.weight" for i in range(layers) for half in halves] + ["norm.weight"]


def tapped_model(bundle: Bundle, graph: GraphSignature) -> tuple[onnx.ModelProto, list[str]]:
    """The graph with its states as outputs, and their names in the order of its nodes."""
    import onnx  # an NPU's machine need not have it

    model = onnx.load(str(bundle.folder / graph.file), load_external_data=False)
    makers = {name: node for node in model.graph.node for name in node.output}
    weights = {f"decoder.{name}" for name in norm_names(bundle.manifest.teacher.config["layers"])}
    # Norms with equal weights share them, so GLM-4's norms of what a block adds to its state may read these as well.
    added = _added(model.graph)
    norms = [node for node in model.graph.node if weights & set(node.input) and node.output[0] not in added]
    states = [_state(node, weights, makers) for node in norms]
    outputs = {value.name for value in model.graph.output}
    for name in states:
        if name not in outputs:
            model.graph.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None))
    return model, states


def _added(graph: onnx.GraphProto) -> set[str]:
    """The names of what is added to something, as it is or after its rows were moved."""
    added = set[str]()
    for node in reversed(graph.node):  # in which every reader comes before what it reads
        if node.op_type in _ADDING or (node.op_type in _MOVING and added & set(node.output)):
            added |= set(node.input)
    return added


def _state(node: onnx.NodeProto, weights: set[str], makers: dict[str, onnx.NodeProto]) -> str:
    """The name of a norm's input, by the node that reads its weight."""
    if node.op_type == "SkipSimplifiedLayerNormalization":  # which adds before it normalises
        while len(node.output) < 4:
            node.output.append("")
        node.output[3] = node.output[3] or f"{node.output[0]}.state"
        return str(node.output[3])
    if node.op_type in ("SimplifiedLayerNormalization", "RMSNormalization"):
        return str(node.input[0])
    maker = next((makers[name] for name in node.input if name not in weights and name in makers), None)
    if node.op_type == "Mul" and maker is not None and maker.op_type == "Div":
        return str(maker.input[0])
    raise InvariantError(f"{node.name} reads a norm's weight and is no norm that is known")


class Taps:
    """The states that an engine's launches have shown; a reference that follows it reads them."""

    def __init__(self) -> None:
        # Of the last launch, text by text.
        self.last: list[States] = []
        # Each one text's part of a launch, the first one first.
        self.waiting: list[States] = []

    def keep(self, rows: Sequence[int]) -> None:
        """Keeps the states of the last launch, whose texts have so many rows each; its other results belong to no
        text."""
        texts = zip(self.last, rows, strict=False)
        self.waiting += [[state[:count] for state in states] for states, count in texts]


class TappedBindings(SessionBindings):
    """Bindings of a graph that gives its states as well."""

    def __init__(self, bundle: Bundle, graph: GraphSignature, threads: int | None, taps: Taps) -> None:
        model, self._states = tapped_model(bundle, graph)
        self._names = norm_names(bundle.manifest.teacher.config["layers"])
        options = session_options(bundle, graph, threads)
        options.add_session_config_entry(_FOLDER, str((bundle.folder / graph.file).parent))
        opened = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        super().__init__(opened, graph)
        self._graph, self._taps, self._order = graph, taps, dict[str, None]()

    def bind(self, name: str, array: NDArray, output: bool) -> None:
        super().bind(name, array, output)
        self._order |= dict.fromkeys([name] * output)

    def run(self) -> None:
        for name in self._states:
            if name not in self._kept:  # a state that is an output already
                self._binding.bind_output(name, "cpu")
                self._order[name] = None
        super().run()
        every = dict(zip(self._order, self._binding.get_outputs(), strict=True))
        self._taps.last = self._by_text([every[name].numpy() for name in self._states])

    def _by_text(self, states: Sequence[NDArray[np.float32]]) -> list[States]:
        """States text by text. Those of a norm come in one piece or text by text, all of as many rows; the last norm's
        are of fewer."""
        of_all, *fewer = (
            [self._kept[spec.name].size for spec in self._graph.inputs if spec.name.endswith(name)]
            for name in ("tokens", "rows", "last")
        )
        texts: list[States] = [[] for _ in of_all]
        at = 0
        for number in range(len(self._names)):
            pieces = [states[at]]
            last = number == len(self._names) - 1
            while (at := at + 1) < len(states) and (last or sum(map(len, pieces)) < sum(of_all)):
                pieces.append(states[at])
            whole = np.concatenate(pieces)
            counts = next((sizes for sizes in (of_all, *fewer) if sum(sizes) == len(whole)), None)
            if counts is None:
                raise InvariantError(f"graph {self._graph.name}: {self._names[number]} normalises {len(whole)} rows")
            for text, rows in zip(texts, np.split(whole, np.cumsum(counts)[:-1]), strict=True):
                text.append(rows)
        return texts


class _Tapped(Engine):
    """An engine whose launches show their states; stands before the engine that it is."""

    taps: Taps

    def append(self, state: SequenceState, chunk_n: NDArray[np.int64]) -> TeacherOutput:
        output = super().append(state, chunk_n)  # type: ignore[safe-super]
        self.taps.keep([len(chunk_n)])
        return output

    def verify(self, states: Sequence[SequenceState], drafts: Sequence[Draft]) -> list[TeacherOutput]:
        outputs = super().verify(states, drafts)  # type: ignore[safe-super]
        self.taps.keep([draft.tree.rows for draft in drafts])
        return outputs


class TappedCpu(_Tapped, CpuEngine):
    """The CPU's engine, whose launches show their states."""

    def __init__(self, bundle: Bundle, opening: Opening = USUAL) -> None:
        self.taps = Taps()
        super().__init__(bundle, opening)

    def _new_bindings(self, graph: GraphSignature) -> Bindings:
        return TappedBindings(self.bundle, graph, self._threads, self.taps)


class TappedBitwise(TappedCpu, BitwiseEngine):
    """The tapped engine whose rows have equal bits."""


class TappedExecutor(OnnxExecutor):
    """Opens the graphs of a teacher so that their launches show states."""

    def __init__(self, bundle: Bundle, threads: int | None) -> None:
        super().__init__(bundle, threads, sessions_in_memory(bundle))
        self.taps = Taps()

    def bindings(self, graph: GraphSignature) -> Bindings:
        if graph.kind not in _KINDS:
            return super().bindings(graph)
        return TappedBindings(self._bundle, graph, self._threads, self.taps)


class TappedStatic(_Tapped, OnnxStaticEngine):
    """The engine of static graphs, whose launches show their states."""

    def __init__(self, bundle: Bundle, opening: Opening = USUAL) -> None:
        graphs = [graph for graph in bundle.manifest.graphs_of("onnx") if graph.static]
        executor = TappedExecutor(bundle, opening.threads)
        self.taps = executor.taps
        StaticEngine.__init__(self, bundle, graphs, executor)


# By the engine's name, the same engine with states to be seen.
TAPPED: dict[str, type[TappedCpu | TappedStatic]] = {
    "cpu": TappedCpu,
    "static": TappedStatic,
    "bitwise": TappedBitwise,
}
