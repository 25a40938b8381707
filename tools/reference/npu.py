"""The engine for an Ascend NPU: the steps of a bundle, compiled by torchair, with weights and caches on the device.

It has never run on a device. What it shares with the other static engines (the choice of graphs, their inputs, the
bookkeeping of the cache) is tested on CPUs through them; what is its own is tested through torchair's eager route,
which traces and compiles as for the device and then runs the traced program on the CPU.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
from pathlib import Path

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from draftwood.compiler.drafters.kinds import drafter_of
from draftwood.compiler.ge.torchair_bridge import compile_step
from draftwood.compiler.steps.rebuild import rebuild
from draftwood.compiler.steps.step import Step
from draftwood.compiler.targets.modules import load_modules
from draftwood.compiler.targets.steps import rebuild_drafts
from draftwood.compiler.teachers.registry import described_config
from draftwood.errors import BundleError
from draftwood.manifest import GraphSignature
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.cache import Cache
from draftwood.runtime.draft_cache import DraftCache
from draftwood.runtime.engine import StepResult
from draftwood.runtime.engines.static import Executable, StaticEngine
from draftwood.tools.reference.eager import host, npu_weights


class NpuEngine(StaticEngine):
    """Compiles a step when it is first needed, once for this content and these versions; later runs load it.

    ``eagerly`` goes torchair's whole way but for the device: no compilation by GE, the traced program is run.
    """

    def __init__(self, bundle: Bundle, device: str = "npu:0", eagerly: bool = False) -> None:
        npu = bundle.manifest.graph_set("ge")
        if npu is None:
            raise BundleError(f"{bundle.folder}: holds no NPU graphs; build it with --target ge")
        super().__init__(bundle, npu.graphs)
        self.device, self.eagerly = torch.device(device), eagerly
        self.dtype: torch.dtype = getattr(torch, npu.precision.activations)
        drafter = drafter_of(bundle.manifest.drafter) if bundle.manifest.drafter else None
        config = described_config(bundle.manifest.teacher.config)
        modules = load_modules(npu_weights(bundle), config, drafter)
        self.decoder = modules[0].to(self.device)
        topologies = {name: topology for name, (topology, _) in bundle.trees.items()}
        self._draft_steps = rebuild_drafts(bundle.manifest, npu, topologies, modules)
        for step in self._draft_steps.values():
            step.module.to(self.device)
        self._drafts: dict[str, InPlaceStep] = {}

    def _run_draft(self, graph: GraphSignature, inputs: dict[str, NDArray], text: DraftCache) -> dict[str, NDArray]:
        if graph.name not in self._drafts:
            self._drafts[graph.name] = self.compiled(graph)
        given = [torch.from_numpy(inputs[spec.name]).to(self.device) for spec in graph.inputs if spec.name in inputs]
        values = [value.to(self.dtype) if value.is_floating_point() else value for value in given]
        outputs = self._drafts[graph.name].compiled(*values, *(side.flatten(0, 1) for side in text.sides))
        return {name: host(value) for name, value in zip(graph.results, outputs, strict=True)}

    def compiled(self, signature: GraphSignature) -> InPlaceStep:
        """A step of the bundle, compiled for the device."""
        step = InPlaceStep(self._draft_steps.get(signature.name) or rebuild(signature, self.decoder))
        step.compiled = compile_step(step, cache_folder(self.bundle, signature), self.eagerly)
        return step

    def _executable(self, signature: GraphSignature) -> Executable:
        return _NpuGraph(self, signature)

    def _zeros(self, shape: tuple[int, ...]) -> Tensor:
        return torch.zeros(shape, dtype=self.dtype, device=self.device)


class InPlaceStep(nn.Module):
    """A step as the device runs it: caches are inputs that it changes, not outputs."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.step = step.module
        names = [spec.name for spec in step.signature.inputs]
        self.written = [
            (number, names.index(step.signature.aliases[spec.name]))
            for number, spec in enumerate(step.signature.outputs)
            if spec.name in step.signature.aliases
        ]
        self.compiled = self.forward

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        outputs = self.step(*inputs)
        for number, place in self.written:
            inputs[place].copy_(outputs[number])
        kept = {number for number, _ in self.written}
        return tuple(value for number, value in enumerate(outputs) if number not in kept)


class _NpuGraph(Executable):
    def __init__(self, engine: NpuEngine, signature: GraphSignature) -> None:
        super().__init__(signature)
        self._engine, self._step = engine, engine.compiled(signature)
        caches = set(signature.caches)
        self._names = [spec.name for spec in signature.inputs if spec.name not in caches]

    def run(self, cache: Cache) -> StepResult:
        device = self._engine.device
        # One transfer each, of a few hundred bytes; the caches and the branch stay where they are.
        small = {name: torch.from_numpy(array).to(device) for name, array in self.inputs.items()} | {
            "branch": cache.branch
        }
        caches = [side.flatten(0, 1) for side in cache.sides]
        results = self._step.compiled(*(small[name] for name in self._names), *caches)
        outputs = dict(zip(self.signature.results, results, strict=True))
        if "branch.out" in outputs:
            cache.next_branch(cache.padded).copy_(outputs["branch.out"])
        return StepResult(*(host(outputs[name]) for name in ("logits", "choice", "features")))


def cache_folder(bundle: Bundle, signature: GraphSignature) -> Path:
    """Where a compiled step is kept: named by all that goes into it.

    torchair's own key covers the module's structure and its options, but neither code nor weights.
    """
    npu, files = bundle.manifest.graph_set("ge"), bundle.manifest.files
    assert npu is not None
    if npu.weights not in files:
        raise BundleError(f"{bundle.folder}: no weights are bound; run draftwood bind {bundle.folder} --model DIR")
    packages = {name: importlib.metadata.version(name) for name in ("torch", "torch_npu")}
    content = [files[signature.file], files[npu.weights], *map("=".join, packages.items())]
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "draftwood" / "npu" / hashlib.sha256("\n".join(content).encode()).hexdigest()[:32]
