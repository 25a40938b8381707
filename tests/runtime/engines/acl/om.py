"""The stand-in's form of an ``.om`` file: the ``.air`` it was made of, with the names of its weight files."""

import functools
import hashlib
import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from draftwood.compiler.ge.graph import Graph
from draftwood.compiler.ge.interpreter import Interpreter, shapes
from draftwood.compiler.ge.torchair_bridge import ge_ir
from draftwood.compiler.ge.weights import bundle_npu_weights
from draftwood.runtime.bundle import Bundle

MAGIC = b"stand-in for an .om file\n"
# A stand-in for ATC: it notes its calls, and leaves a model at the given place, and a note of what it has fused.
ATC = """#!/bin/sh
echo "$*" >> "$ATC_LOG"
echo {} > "${ASCEND_WORK_PATH:-.}/fusion_result.json"
for one in "$@"; do case $one in --model=*) air=${one#--model=};; --output=*) om=${one#--output=};; esac; done
cp "$air" "$om.om"
"""
FLAGS = ("--framework=1", "--mode=0", "--precision_mode_v2=origin", "--external_weight=1")


@dataclass
class Tensor:
    """An input or output as a model describes it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass
class Om:
    """A model: its graph, its weights' files by name, and the work memory that it wants."""

    graph: Graph
    files: dict[str, str]
    work: int
    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> "Om | None":
        data = path.read_bytes()
        return cls.parsed(data) if data.startswith(MAGIC) else None

    @classmethod
    @functools.cache
    def parsed(cls, data: bytes) -> "Om":
        header, air = data.removeprefix(MAGIC).split(b"\n", 1)
        facts = json.loads(header)
        graph = Graph.of(ge_ir().ModelDef.FromString(air).graph[0])
        found = cls(graph, facts["files"], facts["work"])
        known = shapes(graph)
        for node in graph.sources():
            dtype, shape = known[node.name][0]
            described = facts["described"].get(node.name)
            found.inputs.append(Tensor(node.name, getattr(torch, described) if described else dtype, shape))
        for i, edge in enumerate(graph.output.operands):
            found.outputs.append(Tensor(f"output {i}", *known[edge.node][edge.output]))
        return found

    def constant(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        (declared,) = self.graph.nodes[name].output_types
        return declared.dtype, declared.shape

    def bytes(self, name: str) -> int:
        dtype, shape = self.constant(name)
        return torch.Size(shape).numel() * dtype.itemsize

    def interpreter(self, constants: Mapping[str, torch.Tensor]) -> Interpreter:
        return Interpreter(self.graph, constants)


def compile_bundle(folder: Path, scratch: Path) -> list[str]:
    """Runs the bundle's own ``atc.sh`` with the stand-in for ATC; the lines that ATC was called with."""
    tools, log = scratch / "bin", scratch / "atc.log"
    tools.mkdir(exist_ok=True)
    (tools / "atc").write_text(ATC)
    (tools / "atc").chmod(0o755)
    environment = os.environ | {"PATH": f"{tools}:{os.environ['PATH']}", "ATC_LOG": str(log)}
    subprocess.run(["sh", str(folder / "npu" / "atc.sh")], check=True, env=environment, timeout=300)
    bundle = Bundle.open(folder)
    weights = bundle_npu_weights(folder, bundle.manifest.graph_set("ge"))
    (folder / "npu" / "om" / "weight").mkdir()
    for path in (folder / "npu" / "om").glob("*.om"):
        _finish(path, weights)
    return log.read_text().splitlines()


def _finish(path: Path, weights: Mapping[str, torch.Tensor]) -> None:
    """The effect of ATC's ``--external_weight=1``: a file for each weight, named by its content."""
    graph, files = Graph.load(path), {}
    for node in graph.nodes.values():
        if node.type == "FileConstant":
            data = weights[node.name].contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            files[node.name] = f"weight_{hashlib.sha256(data).hexdigest()}"
            (path.parent / "weight" / files[node.name]).write_bytes(data)
    header = json.dumps({"files": files, "work": 4096 + 512 * len(graph.nodes), "described": {}}).encode()
    path.write_bytes(MAGIC + header + b"\n" + path.read_bytes())
