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

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from draftwood.compiler.bundle import load_modules
from draftwood.compiler.config import TeacherConfig
from draftwood.compiler.ge.torchair_bridge import compile_step
from draftwood.compiler.ge.weights import map_npu_weights, read_index
from draftwood.compiler.steps import Step, rebuild
from draftwood.errors import BundleError
from draftwood.manifest import GraphSignature
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.cache import Cache
from draftwood.runtime.engine import StepResult
from draftwood.runtime.static_engine import Executable, StaticEngine


class NpuEngine(StaticEngine):
    """Compiles a step when it is first needed, once for this content and these versions; later runs load it.

    ``eagerly`` goes torchair's whole way but for the device: no compilation by GE, the traced program is run.
    """

    def __init__(self, bundle: Bundle, device: str = "npu:0", eagerly: bool = False) -> None:
        npu = bundle.manifest.npu
        if npu is None:
            raise BundleError(f"{bundle.folder}: holds no NPU graphs; build it with --target ge")
        super().__init__(bundle, npu.graphs)
        self.device, self.eagerly = torch.device(device), eagerly
        self.dtype: torch.dtype = getattr(torch, npu.dtype)
        index = bundle.folder / npu.index
        drafter = bundle.manifest.drafter
        heads = (drafter.levels, drafter.blocks, drafter.tied) if drafter else None
        config = msgspec.convert(bundle.manifest.teacher.config, TeacherConfig)
        decoder, self.heads = load_modules(map_npu_weights(index.parent, read_index(index)), config, heads)
        self.decoder = decoder.to(self.device)
        if self.heads is not None:
            self.heads.to(self.device)
        self._draft = next((graph for graph in npu.graphs if graph.kind == "draft"), None)
        self._drafter: InPlaceStep | None = None

    def draft(self, hidden_1H: NDArray[np.float32]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        assert self._draft is not None
        self._drafter = self._drafter or self.compiled(self._draft)
        tokens_IK, scores_IK = self._drafter.compiled(torch.tensor(hidden_1H, dtype=self.dtype, device=self.device))
        return tokens_IK.cpu().numpy(), scores_IK.float().cpu().numpy()

    def compiled(self, signature: GraphSignature) -> InPlaceStep:
        """A step of the bundle, compiled for the device."""
        step = InPlaceStep(rebuild(signature, self.decoder, self.heads))
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
        values = (outputs[name] for name in ("logits", "choice", "hidden"))
        return StepResult(*(v.float().cpu().numpy() if v.is_floating_point() else v.cpu().numpy() for v in values))


def cache_folder(bundle: Bundle, signature: GraphSignature) -> Path:
    """Where a compiled step is kept: named by all that goes into it.

    torchair's own key covers the module's structure and its options, but neither code nor weights.
    """
    npu, files = bundle.manifest.npu, bundle.manifest.files
    assert npu is not None
    if npu.weights not in files:
        raise BundleError(f"{bundle.folder}: no weights are bound; run draftwood bind {bundle.folder} --model DIR")
    packages = {name: importlib.metadata.version(name) for name in ("torch", "torch_npu")}
    content = [files[signature.file], files[npu.weights], *map("=".join, packages.items())]
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "draftwood" / "npu" / hashlib.sha256("\n".join(content).encode()).hexdigest()[:32]
