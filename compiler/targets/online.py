"""Runs a bundle's NPU graphs through torchair: every step is traced, compiled for the device, and kept there.

It has never run on a device. The tests use torchair's eager route, which traces and compiles as for the device and then
runs the traced program on the CPU.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec

from draftwood.compiler.ge.forms import argument
from draftwood.compiler.ge.graph import Graph
from draftwood.compiler.ge.sameness import same_as_proved
from draftwood.compiler.ge.texts import texts_step
from draftwood.compiler.ge.torchair_bridge import compile_step, decomposed, device_of, devices
from draftwood.compiler.ge.weights import bundle_npu_weights
from draftwood.compiler.steps.rebuild import rebuild
from draftwood.compiler.steps.step import Step
from draftwood.compiler.steps.tracing import trace
from draftwood.compiler.targets.bundled import bundle_drafts, bundle_modules, bundle_wholes, required_set
from draftwood.compiler.targets.staging import HostInputs, HostOutputs
from draftwood.environment import cann_version
from draftwood.errors import BundleError
from draftwood.files import cache_home
from draftwood.manifest import GraphSignature, Manifest, TensorSignature


class TorchairExecutor:
    """Compiles a step when it is first needed, once for this content and these versions; later runs load it.

    ``eagerly`` takes torchair's whole route except for the device: GE compiles nothing, and the traced program is run.
    With several ranks it is ``rank``, which meets the others in the default process group.
    """

    def __init__(
        self, folder: Path, manifest: Manifest, device: str = "npu:0", eagerly: bool = False, rank: int = 0
    ) -> None:
        graphs = required_set(folder, manifest, "ge", rank)
        self.folder, self.manifest, self.rank = folder, manifest, rank
        self.device, self.eagerly = device_of(device), eagerly
        if manifest.packed:
            # torchair hands it to GE, without which a kernel adds the groups of packed weights up in any order. It
            # stays on, because dynamo's compiled functions hold in this state alone.
            torch.use_deterministic_algorithms(True, warn_only=True)
        self.dtype: torch.dtype = getattr(torch, graphs.precision.activations)
        modules = bundle_modules(manifest, bundle_npu_weights(folder, graphs), graphs.ranks)
        self.decoder = modules[0].to(self.device)
        self._made = bundle_drafts(folder, manifest, graphs, modules) | bundle_wholes(folder, manifest, graphs, modules)
        for step in self._made.values():
            step.module.to(self.device)
        self._steps: dict[str, Started] = {}

    def zeros(self, shape: tuple[int, ...]) -> Tensor:
        """A buffer on the device, in the graphs' element type."""
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def run(
        self, graph: GraphSignature, inputs: Mapping[str, NDArray], buffers: Mapping[str, Any]
    ) -> dict[str, NDArray]:
        """Runs a graph on small inputs from the host and on buffers of the device; caches are written in place.

        One copy in, one launch, one copy out; outputs that stay on the device are copied there.
        """
        if graph.name not in self._steps:
            self._steps[graph.name] = self.started(graph)
        return self._steps[graph.name](inputs, buffers)

    def started(self, graph: GraphSignature) -> Started:
        """A step of the bundle that can be launched."""
        return Started(self.compiled(graph), graph, self.device)

    def traced(self, signature: GraphSignature) -> InPlaceStep:
        """A step of the bundle as the device runs it."""
        return InPlaceStep(self._made.get(signature.name) or self._rebuilt(signature), self.device)

    def _rebuilt(self, signature: GraphSignature) -> Step:
        """A step that is not of one text's drafter alone."""
        if signature.kind != "draft-texts":
            return rebuild(signature, self.decoder)
        single = self._made[signature.name.removesuffix(f"-b{signature.batch}")]
        return texts_step(single, trace(single, self.device), signature.batch)

    def compiled(self, signature: GraphSignature) -> InPlaceStep:
        """A step of the bundle, compiled by GE."""
        step = self.traced(signature)
        proved = Graph.load(self.folder / signature.file)
        step.compiled = compile_step(
            step,
            compile_cache(self.folder, self.manifest, signature, self.rank, chip_of(self.device)),
            self.eagerly,
            lambda definition: same_as_proved(
                definition, step.constants, proved, f"{self.folder}: graph {signature.name}"
            ),
        )
        return step

    def read(self, buffer: Tensor) -> NDArray:
        """See `draftwood.runtime.engines.executor.Executor.read`."""
        return host(buffer)


# A step on the device: the host's inputs, and the buffers there, by name. Leaves the host's outputs in a block.
Launch = Callable[[Mapping[str, Tensor], Mapping[str, Any]], HostOutputs]


class Started:
    """A compiled step with the blocks that its small tensors cross in; they are made when it is first launched.

    ``as_one`` may make another of the launch, which waits for nothing and reads nothing of the host.
    """

    def __init__(
        self,
        step: InPlaceStep,
        graph: GraphSignature,
        device: torch.device,
        as_one: Callable[[Launch], Launch] = lambda launch: launch,
    ) -> None:
        self._step, self._graph, self._device = step, graph, device
        # By the names of the inputs or outputs that cross: some may stay on the device.
        self._uploads: dict[frozenset[str], HostInputs] = {}
        self._downloads: dict[frozenset[str], HostOutputs] = {}
        self._launch = as_one(self._launched)

    def __call__(self, inputs: Mapping[str, NDArray], buffers: Mapping[str, Any]) -> dict[str, NDArray]:
        """See `TorchairExecutor.run`."""
        names = frozenset(inputs)
        if (uploads := self._uploads.get(names)) is None:
            specs = [s for s in self._graph.inputs if s.name in names]
            uploads = self._uploads[names] = HostInputs(specs, self._device)
        uploads.upload(inputs)
        return self._launch(uploads.tensors, buffers).download()

    def _launched(self, inputs: Mapping[str, Tensor], buffers: Mapping[str, Any]) -> HostOutputs:
        tensors, caches = {**inputs, **buffers}, set(self._graph.caches)
        specs = self._graph.inputs
        values = [declared(tensors[s.name], s) if s.name in caches else tensors[s.name] for s in specs]
        outputs = dict(zip(self._graph.results, self._step.compiled(*values), strict=True))
        for name in outputs.keys() & buffers.keys():
            buffers[name].copy_(outputs.pop(name))
        if (downloads := self._downloads.get(frozenset(outputs))) is None:
            downloads = self._downloads[frozenset(outputs)] = HostOutputs(outputs, self._device)
        downloads.gather(outputs)
        return downloads


class InPlaceStep(nn.Module):
    """A step as the device runs it: caches are inputs that it changes, not outputs.

    It runs the exported program of the step's ``.air``, already in the NPU's operators. So the graph compiled for the
    device is the graph that was proved.
    """

    def __init__(self, step: Step, device: torch.device) -> None:
        super().__init__()
        program = trace(step, device)
        self.graph = decomposed(program)
        specs = _value_specs(program, self.graph)
        values = _values(program, self.graph, specs)
        self.held = [f"held_{i}" for i in range(len(specs))]
        # Constants of the code, not of the model: a file's graph has them as constants.
        self.constants = [
            v.cpu() for v, s in zip(values, specs, strict=True) if step.weight_name(str(s.target)) is None
        ]
        for name, value in zip(self.held, values, strict=True):
            # A parameter, rotary tables as well: torchair fixes the addresses of no other input.
            self.register_parameter(name, nn.Parameter(value, requires_grad=False))
        names = [spec.name for spec in step.signature.inputs]
        self.written = [
            (number, names.index(step.signature.aliases[spec.name]))
            for number, spec in enumerate(step.signature.outputs)
            if spec.name in step.signature.aliases
        ]
        self.compiled = self.forward

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        outputs = self.graph(*(getattr(self, name) for name in self.held), *inputs)
        for number, place in self.written:
            inputs[place].copy_(outputs[number])
        in_place = {number for number, _ in self.written}
        return tuple(value for number, value in enumerate(outputs) if number not in in_place)


def _value_specs(program: ExportedProgram, graph: fx.GraphModule) -> list[InputSpec]:
    """Weights and constants of a program, in the order in which its decomposed ``graph`` takes them."""
    specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs if spec.kind != InputKind.USER_INPUT}
    return [specs[node.name] for node in graph.graph.find_nodes(op="placeholder") if node.name in specs]


def _values(program: ExportedProgram, graph: fx.GraphModule, specs: Sequence[InputSpec]) -> list[Tensor]:
    """The values of the program's parameters and constants."""
    products = graph.graph.find_nodes(op="call_function", target=torch.ops.draftwood.linear.default)
    wide = {bias.name for product in products if (bias := argument(product, "bias")) is not None}
    parameters = [program.state_dict.get(str(spec.target)) for spec in specs]
    values = [
        program.constants[str(s.target)] if value is None else value for s, value in zip(specs, parameters, strict=True)
    ]
    # The biases of bf16 products are in float32, as in the weights file.
    return [
        v.float() if spec.arg.name in wide and v.dtype == torch.bfloat16 else v
        for spec, v in zip(specs, values, strict=True)
    ]


def declared(buffer: Tensor, spec: TensorSignature) -> Tensor:
    """A cache [K, C, D] as a graph declares it, in the same memory: flat [K*C, D], or [C, K*D] with one row a token."""
    kv_heads, slots, dim = buffer.shape
    return buffer.swapaxes(0, 1).view(slots, -1) if spec.shape[0] == slots else buffer.view(kv_heads * slots, dim)


def host(value: Tensor) -> NDArray:
    """A graph's output in the host's memory: whole numbers as they are, all else as fp32."""
    return (value.float() if value.is_floating_point() else value).cpu().numpy()


def chip_of(device: torch.device) -> str:
    """The name of an NPU's chip; "" for a CPU."""
    return "" if device.type == "cpu" else str(devices().get_device_name(device))


def compile_cache(folder: Path, manifest: Manifest, signature: GraphSignature, rank: int = 0, chip: str = "") -> Path:
    """The folder of a compiled step, named by everything that goes into it: GE's result is for one chip, and of one
    release of CANN. torchair's own key covers the module's structure and its options, but neither code nor weights."""
    npu, files = required_set(folder, manifest, "ge", rank), manifest.files
    if npu.weights not in files:
        raise BundleError(f"{folder}: no weights are bound; run draftwood bind {folder} MODEL")
    packages = {name: importlib.metadata.version(name) for name in ("torch", "torch_npu")}
    made_by = {**packages, "cann": cann_version() or "", "chip": chip}
    content = [files[signature.file].sha256, files[npu.weights].sha256, *map("=".join, made_by.items())]
    return cache_home() / "draftwood" / "npu" / hashlib.sha256("\n".join(content).encode()).hexdigest()[:32]
