"""Runs a bundle's NPU graphs through torchair: every step is traced, compiled for the device, and kept there.

It has never run on a device. What is its own is tested through torchair's eager route, which traces and compiles as
for the device and then runs the traced program on the CPU.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from draftwood.compiler.ge.torchair_bridge import compile_step, decomposed, device_of
from draftwood.compiler.ge.weights import bundle_npu_weights
from draftwood.compiler.steps.rebuild import rebuild
from draftwood.compiler.steps.step import DTYPES, Step
from draftwood.compiler.steps.tracing import trace
from draftwood.compiler.targets.bundled import bundle_drafts, bundle_modules, bundle_wholes, required_set
from draftwood.errors import BundleError
from draftwood.files import cache_home
from draftwood.manifest import GraphSignature, Manifest, TensorSignature


class TorchairExecutor:
    """Compiles a step when it is first needed, once for this content and these versions; later runs load it.

    ``eagerly`` goes torchair's whole way but for the device: no compilation by GE, the traced program is run.
    """

    def __init__(self, folder: Path, manifest: Manifest, device: str = "npu:0", eagerly: bool = False) -> None:
        graphs = required_set(folder, manifest, "ge")
        self.folder, self.manifest = folder, manifest
        self.device, self.eagerly = device_of(device), eagerly
        self.dtype: torch.dtype = getattr(torch, graphs.precision.activations)
        modules = bundle_modules(manifest, bundle_npu_weights(folder, graphs))
        self.decoder = modules[0].to(self.device)
        self._made = bundle_drafts(folder, manifest, graphs, modules) | bundle_wholes(folder, manifest, graphs, modules)
        for step in self._made.values():
            step.module.to(self.device)
        self._steps: dict[str, InPlaceStep] = {}

    def zeros(self, shape: tuple[int, ...]) -> Tensor:
        """A buffer on the device, in the graphs' element type."""
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def run(
        self, graph: GraphSignature, inputs: Mapping[str, NDArray], buffers: Mapping[str, Any]
    ) -> dict[str, NDArray]:
        """Runs a graph on small inputs from the host and on buffers of the device; caches are written in place.

        The inputs are one transfer each, of a few hundred bytes; caches and branch stay where they are.
        """
        if graph.name not in self._steps:
            self._steps[graph.name] = self.compiled(graph)
        types = {spec.name: DTYPES[spec.dtype] for spec in graph.inputs}
        given = {name: torch.from_numpy(a).to(self.device, types[name]) for name, a in inputs.items()} | dict(buffers)
        caches = set(graph.caches)
        values = [declared(given[s.name], s) if s.name in caches else given[s.name] for s in graph.inputs]
        outputs = dict(zip(graph.results, self._steps[graph.name].compiled(*values), strict=True))
        for name in outputs.keys() & buffers.keys():
            buffers[name].copy_(outputs.pop(name))
        return {name: host(value) for name, value in outputs.items()}

    def compiled(self, signature: GraphSignature) -> InPlaceStep:
        """A step of the bundle, compiled for the device."""
        made = self._made.get(signature.name) or rebuild(signature, self.decoder)
        step = InPlaceStep(made, self.device)
        step.compiled = compile_step(step, compile_cache(self.folder, self.manifest, signature), self.eagerly)
        return step

    def read(self, buffer: Tensor) -> NDArray:
        """See `draftwood.runtime.engines.executor.Executor.read`."""
        return host(buffer)


class InPlaceStep(nn.Module):
    """A step as the device runs it: caches are inputs that it changes, not outputs.

    What it runs is the exported program that the step's ``.air`` was made of, put in the NPU's operators already, so
    that the graph compiled for the device is the one that was proved.
    """

    def __init__(self, step: Step, device: torch.device) -> None:
        super().__init__()
        program = trace(step, device)
        self.graph = decomposed(program)
        self.held = [f"held_{i}" for i in range(len(program.graph_signature.input_specs) - len(step.signature.inputs))]
        for name, value in zip(self.held, _held(program, self.graph), strict=True):
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
        kept = {number for number, _ in self.written}
        return tuple(value for number, value in enumerate(outputs) if number not in kept)


def _held(program: ExportedProgram, graph: fx.GraphModule) -> list[Tensor]:
    """Weights and constants of a program, in the order in which its decomposed ``graph`` takes them."""
    specs = program.graph_signature.input_specs
    targets = {spec.arg.name: str(spec.target) for spec in specs if spec.kind != InputKind.USER_INPUT}
    taken = [targets[node.name] for node in graph.graph.find_nodes(op="placeholder") if node.name in targets]
    return [program.state_dict[name] if name in program.state_dict else program.constants[name] for name in taken]


def declared(buffer: Tensor, spec: TensorSignature) -> Tensor:
    """A cache [K, C, D] as a graph declares it, in the same memory: flat [K*C, D], or [C, K*D] with one row a token."""
    kv_heads, slots, dim = buffer.shape
    return buffer.swapaxes(0, 1).view(slots, -1) if spec.shape[0] == slots else buffer.view(kv_heads * slots, dim)


def host(value: Tensor) -> NDArray:
    """A graph's output in the host's memory: whole numbers as they are, all else as fp32."""
    return (value.float() if value.is_floating_point() else value).cpu().numpy()


def compile_cache(folder: Path, manifest: Manifest, signature: GraphSignature) -> Path:
    """Where a compiled step is kept: named by all that goes into it.

    torchair's own key covers the module's structure and its options, but neither code nor weights.
    """
    npu, files = required_set(folder, manifest, "ge"), manifest.files
    if npu.weights not in files:
        raise BundleError(f"{folder}: no weights are bound; run draftwood bind {folder} --model DIR")
    packages = {name: importlib.metadata.version(name) for name in ("torch", "torch_npu")}
    content = [files[signature.file].sha256, files[npu.weights].sha256, *map("=".join, packages.items())]
    return cache_home() / "draftwood" / "npu" / hashlib.sha256("\n".join(content).encode()).hexdigest()[:32]
