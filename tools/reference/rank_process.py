"""One rank of a bundle in a process of its own: its steps, run eagerly over its weights, and its buffers.

The process is told what to do on its standard input and answers on its standard output, one message each: the length,
eight bytes, and MessagePack. It ends when its input ends, so no rank outlives the process that started it.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, distributed

from draftwood.compiler.drafters.registry import drafter_of
from draftwood.compiler.ge.weights import bundle_npu_weights
from draftwood.compiler.steps.rebuild import rebuild
from draftwood.compiler.steps.step import Step
from draftwood.compiler.targets.bundled import bundle_drafts
from draftwood.compiler.targets.modules import load_modules
from draftwood.compiler.targets.online import declared, host
from draftwood.compiler.teachers.registry import described_config
from draftwood.manifest import GraphSet, Manifest, read_manifest

# How long a rank waits for another that lives; one that has died is noticed at once.
PATIENCE = timedelta(minutes=30)


class Array(msgspec.Struct):
    """A numpy array as bytes."""

    kind: str
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, value: NDArray) -> Array:
        return cls(value.dtype.name, value.shape, value.tobytes())

    @property
    def value(self) -> NDArray:
        return np.frombuffer(self.data, self.kind).reshape(self.shape).copy()


class View(msgspec.Struct):
    """A part of the buffer ``key``, as strides see it."""

    key: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


class Make(msgspec.Struct, tag=True):
    """A buffer of zeros."""

    key: int
    shape: tuple[int, ...]


class Drop(msgspec.Struct, tag=True):
    """Buffers that nobody has any more."""

    keys: list[int]


class Copy(msgspec.Struct, tag=True):
    """What one part of a buffer holds into another."""

    into: View
    source: View


class Read(msgspec.Struct, tag=True):
    """What a part of a buffer holds."""

    part: View


class Launch(msgspec.Struct, tag=True):
    """A step on small inputs and on parts of buffers."""

    graph: str
    inputs: dict[str, Array]
    buffers: dict[str, View]


Order = Make | Drop | Copy | Read | Launch


class Answer(msgspec.Struct):
    """What was asked for, small outputs of a step, of rank 0 alone; or why there is nothing."""

    outputs: dict[str, Array] = {}
    error: str = ""


def send(file: BinaryIO, message: msgspec.Struct) -> None:
    data = msgspec.msgpack.encode(message)
    file.write(len(data).to_bytes(8, "little") + data)
    file.flush()


def receive(file: BinaryIO, kind: Any) -> Any:
    """The next message; EOFError where the other side has ended."""
    size = file.read(8)
    data = file.read(int.from_bytes(size, "little")) if len(size) == 8 else b""
    if len(size) < 8 or len(data) < int.from_bytes(size, "little"):
        raise EOFError
    return msgspec.msgpack.decode(data, type=kind)


class Rank:
    """The steps of one graph set, in fp32 over its weights: sums of parts would part from one rank's in bf16."""

    def __init__(self, folder: Path, manifest: Manifest, graphs: GraphSet) -> None:
        weights = {n: t.float() if t.is_floating_point() else t for n, t in bundle_npu_weights(folder, graphs).items()}
        drafter = drafter_of(manifest.drafter) if manifest.drafter else None
        config = described_config(manifest.teacher.config)
        modules = load_modules(weights, config, drafter, graphs.ranks)
        self.signatures = {graph.name: graph for graph in graphs.graphs}
        self.decoder, self.steps = modules[0], bundle_drafts(folder, manifest, graphs, modules)
        self.buffers: dict[int, Tensor] = {}

    def obey(self, order: Order) -> dict[str, NDArray]:
        """Does what is asked; the small outputs of a step, or what was read."""
        if isinstance(order, Make):
            self.buffers[order.key] = torch.zeros(order.shape)
        elif isinstance(order, Drop):
            for key in order.keys:
                del self.buffers[key]
        elif isinstance(order, Copy):
            self._part(order.into).copy_(self._part(order.source))
        elif isinstance(order, Read):
            return {"part": host(self._part(order.part))}
        else:
            buffers = {name: self._part(view) for name, view in order.buffers.items()}
            return self._launch(order.graph, {name: array.value for name, array in order.inputs.items()}, buffers)
        return {}

    def _part(self, view: View) -> Tensor:
        return self.buffers[view.key].as_strided(view.shape, view.strides, view.offset)

    def _step(self, name: str) -> Step:
        if name not in self.steps:
            self.steps[name] = rebuild(self.signatures[name], self.decoder)
        return self.steps[name]

    @torch.inference_mode()
    def _launch(self, name: str, inputs: Mapping[str, NDArray], buffers: Mapping[str, Tensor]) -> dict[str, NDArray]:
        graph = self.signatures[name]
        given = {key: torch.from_numpy(value) for key, value in inputs.items()} | dict(buffers)
        caches = {spec.name: declared(given[spec.name], spec) for spec in graph.inputs if spec.name in graph.caches}
        results = self._step(name).module(*(caches.get(spec.name, given[spec.name]) for spec in graph.inputs))
        outputs = {spec.name: value for spec, value in zip(graph.outputs, results, strict=True)}
        for out, cache in graph.aliases.items():
            caches[cache].copy_(outputs.pop(out))
        for key in outputs.keys() & buffers.keys():
            buffers[key].copy_(outputs.pop(key))
        return {key: host(value) for key, value in outputs.items()}


def serve(folder: str, rank: str, store: str, threads: str) -> int:
    """Runs until the input ends."""
    # Whoever started the ranks is interrupted, and ends them; what a library prints must not go between the answers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    inward, outward = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    torch.set_num_threads(int(threads))
    manifest, number = read_manifest(Path(folder)), int(rank)
    graphs = manifest.rank_sets("ge")[number]
    shared = distributed.FileStore(store, graphs.ranks)  # type: ignore[attr-defined]
    distributed.init_process_group("gloo", store=shared, rank=number, world_size=graphs.ranks, timeout=PATIENCE)
    worker = Rank(Path(folder), manifest, graphs)
    send(outward, Answer())
    with suppress(EOFError, BrokenPipeError):
        while True:
            send(outward, _answer(worker, receive(inward, Order), number))
    # Without a farewell to the others, who may be gone: nothing is left to be written.
    os._exit(0)


def _answer(worker: Rank, order: Order, rank: int) -> Answer:
    try:
        found = worker.obey(order)
    except Exception as error:  # whatever it is, the one who waits for an answer says it
        return Answer(error=f"{type(error).__name__}: {error}".partition("\n")[0])
    return Answer({name: Array.of(value) for name, value in found.items()} if rank == 0 else {})


if __name__ == "__main__":
    sys.exit(serve(*sys.argv[1:]))
