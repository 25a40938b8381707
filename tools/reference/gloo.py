"""The engine that runs a bundle's ranks in processes of their own, with gloo between them, on one machine's CPU.

Every rank runs the very steps that its graphs were lowered from, so what is proved here of the split (which weight is
cut where, what is added up, what is gathered) holds for the graphs. A rank that dies ends the others: the process that
started them sees it at once, whatever it waits for.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, cast
from weakref import finalize

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftwood.errors import BundleError
from draftwood.manifest import GraphSignature
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.engines.static import StaticEngine
from draftwood.tools.reference.rank_process import (
    Answer,
    Array,
    Copy,
    Drop,
    Launch,
    Make,
    Order,
    Read,
    View,
    receive,
    send,
)

# Seconds that a process gets to end, once its input has ended, before it is killed.
_GRACE = 5.0


class FarBuffer:
    """A part of a buffer that every rank has one of; here are only its shape and strides."""

    def __init__(self, ranks: Ranks, key: int, shape: Tensor, whole: FarBuffer | None = None) -> None:
        # The whole lives as long as any part of it.
        self._ranks, self._key, self._shape, self._whole = ranks, key, shape, whole

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._shape.shape)

    @property
    def nbytes(self) -> int:
        """Of one rank's."""
        return self._shape.nbytes

    @property
    def itemsize(self) -> int:
        return self._shape.itemsize

    @property
    def view(self) -> View:
        """How a rank finds it."""
        return View(self._key, self.shape, self._shape.stride(), int(self._shape.storage_offset()))

    def reshape(self, shape: tuple[int, ...]) -> FarBuffer:
        return self._seen(self._shape.view(shape))

    def ravel(self) -> FarBuffer:
        return self._seen(self._shape.view(-1))

    def swapaxes(self, one: int, other: int) -> FarBuffer:
        return self._seen(self._shape.swapaxes(one, other))

    def __getitem__(self, place: Any) -> FarBuffer:
        return self._seen(self._shape[place])

    def __setitem__(self, place: Any, value: FarBuffer) -> None:
        self._ranks.tell(Copy(self[place].view, value.view))

    def _seen(self, shape: Tensor) -> FarBuffer:
        return FarBuffer(self._ranks, self._key, shape, self)


class Ranks:
    """The processes of all ranks of a bundle, as one executor.

    Raises:
        BundleError: a rank has died or cannot do what it is asked; the others are ended first.
    """

    def __init__(self, bundle: Bundle, threads: int | None = None) -> None:
        self._folder, count = bundle.folder, bundle.npu_graphs().ranks
        self._failed, self._buffers, self._gone = "", 0, list[int]()
        self._place = tempfile.TemporaryDirectory(prefix="draftwood-ranks-")
        each = max((threads or os.cpu_count() or 1) // count, 1)
        self.processes = [self._started(rank, each) for rank in range(count)]
        self._end = finalize(self, _end, self.processes, self._place)
        self._answers()

    def _started(self, rank: int, threads: int) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-P", "-m", "draftwood.tools.reference.rank_process"]
        words += [str(self._folder.resolve()), str(rank), str(Path(self._place.name) / "store"), str(threads)]
        paths = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
        # The ranks are all of this machine, whatever its name resolves to.
        given = {**os.environ, "PYTHONPATH": paths, "GLOO_SOCKET_IFNAME": "lo", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        with (Path(self._place.name) / f"rank-{rank}.log").open("wb") as log:
            return subprocess.Popen(words, env=given, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log)

    def zeros(self, shape: tuple[int, ...]) -> FarBuffer:
        """A buffer of fp32 zeros on every rank."""
        self._buffers += 1
        key = self._buffers
        self.tell(Make(key, shape))
        buffer = FarBuffer(self, key, torch.empty(shape, device="meta"))
        finalize(buffer, self._gone.append, key)
        return buffer

    def run(
        self, graph: GraphSignature, inputs: Mapping[str, NDArray], buffers: Mapping[str, FarBuffer]
    ) -> dict[str, NDArray]:
        """See `draftwood.runtime.engines.executor.Executor.run`."""
        given = {name: Array.of(value) for name, value in inputs.items()}
        found = self.tell(Launch(graph.name, given, {name: buffer.view for name, buffer in buffers.items()}))
        return {name: array.value for name, array in found.outputs.items()}

    def read(self, buffer: FarBuffer) -> NDArray[np.float32]:
        """See `draftwood.runtime.engines.executor.Executor.read`; every rank has the same."""
        return self.tell(Read(buffer.view)).outputs["part"].value

    def tell(self, order: Order) -> Answer:
        """What rank 0 answers, once all have answered."""
        if self._gone and not isinstance(order, Drop):
            gone = self._gone[:]
            del self._gone[: len(gone)]
            self.tell(Drop(gone))
        if self._failed:
            raise BundleError(self._failed)
        for process in self.processes:
            try:
                send(cast(Any, process.stdin), order)
            except BrokenPipeError:
                self._fail("")
        return self._answers()[0]

    def close(self) -> None:
        """Ends all processes."""
        self._failed = self._failed or f"{self._folder}: is closed; open it again"
        self._end()

    def _answers(self) -> Sequence[Answer]:
        """One of each rank; they are waited for together, so that the first to die is seen."""
        found: dict[int, Answer] = {}
        with selectors.DefaultSelector() as waiting:
            for rank, process in enumerate(self.processes):
                waiting.register(cast(IO[bytes], process.stdout), selectors.EVENT_READ, rank)
            while len(found) < len(self.processes):
                for key, _ in waiting.select():
                    rank = int(key.data)
                    try:
                        found[rank] = receive(cast(Any, key.fileobj), Answer)
                    except EOFError:
                        self._fail("")
                    if found[rank].error:
                        self._fail(f"rank {rank}: {found[rank].error}")
                    waiting.unregister(key.fileobj)
        return [found[rank] for rank in range(len(self.processes))]

    def _fail(self, why: str) -> None:
        """Ends the ranks and says which of them died, or else ``why``."""
        dead = self._died()
        ranks = len(self.processes)
        what = f"rank {dead[0]} of {ranks} ended ({dead[1]})" if dead else why or "a rank does not answer"
        self._failed = f"{self._folder}: {what}; all ranks are ended; open it again, with memory for {ranks} ranks"
        for process in self.processes:
            process.kill()
        self._end()
        raise BundleError(self._failed)

    def _died(self) -> tuple[int, str] | None:
        """The first rank that has ended by itself, and how; an error of another one follows its death by moments."""
        for wait in (0.5, 0.0):
            for rank, process in enumerate(self.processes):
                try:
                    code = process.wait(wait / len(self.processes))
                except subprocess.TimeoutExpired:
                    continue
                return rank, signal.Signals(-code).name if code < 0 else f"{_last_line(self._place.name, rank)}"
        return None


def _last_line(place: str, rank: int) -> str:
    """The last thing that a rank said before it ended."""
    lines = (Path(place) / f"rank-{rank}.log").read_text(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "without a word")


def _end(processes: Sequence[subprocess.Popen[bytes]], place: tempfile.TemporaryDirectory[str]) -> None:
    for process in processes:
        with suppress(BrokenPipeError):
            cast(IO[bytes], process.stdin).close()
    for process in processes:
        try:
            process.wait(_GRACE / len(processes))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        cast(IO[bytes], process.stdout).close()
    place.cleanup()


class GlooEngine(StaticEngine):
    """Decodes with the steps of a bundle's NPU graphs, each rank's in a process, in fp32."""

    executor: Ranks

    def __init__(self, bundle: Bundle, threads: int | None = None) -> None:
        self.ranks = len(bundle.manifest.rank_sets("ge"))
        super().__init__(bundle, bundle.manifest.graphs_of("ge"), Ranks(bundle, threads))

    def close(self) -> None:
        super().close()
        self.executor.close()
