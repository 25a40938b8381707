"""The engine that runs a bundle's ranks, one process each, started by ``torchrun``.

Every process gives the same command. Rank 0 decodes; the others follow rank 0's orders in the engine's constructor, and
end with it. A rank runs its graphs on its NPU, joined by HCCL, or has them interpreted here, joined by gloo.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from threading import Lock, Thread
from typing import Any, Literal
from weakref import finalize

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, distributed

from draftwood.environment import npu_count
from draftwood.errors import BundleError, RequestError
from draftwood.manifest import GraphSignature
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.engines.executor import Executor
from draftwood.runtime.engines.opening import USUAL, Opening
from draftwood.runtime.engines.static import StaticEngine
from draftwood.threads import counted_threads
from draftwood.tools.reference.ge import InterpreterExecutor
from draftwood.tools.reference.invariants import Held
from draftwood.tools.reference.orders import (
    ArrayBytes,
    Copy,
    Drop,
    Gather,
    LaunchOrder,
    Make,
    Order,
    Orders,
    Stop,
    View,
)

# How long a rank waits in a collective for one that lives: the others may run slower, or still compile.
PATIENCE = timedelta(minutes=10)
# Held by the first to say why the ranks end.
TOLD = Lock()
# Makes the executor of a rank's graphs.
Local = Callable[[Bundle, int], Executor]


def local_executor(bundle: Bundle, rank: int) -> Executor:
    """A rank's graphs on its NPU if there are some, else interpreted."""
    if not npu_count():
        return InterpreterExecutor(bundle, rank=rank, gathered=_gathered)
    from draftwood.compiler.targets.online import TorchairExecutor

    return TorchairExecutor(bundle.folder, bundle.manifest, f"npu:{os.environ['LOCAL_RANK']}", rank=rank)


def _gathered(values: Sequence[Tensor]) -> list[Tensor]:
    """The values of all ranks in a collective; this one brings the only value of ``values``."""
    (brought,) = values
    sent = brought.contiguous().view(-1).view(torch.uint8)
    parts = [torch.empty_like(sent) for _ in range(distributed.get_world_size())]
    distributed.all_gather(parts, sent)
    return [part.view(brought.dtype).view(brought.shape) for part in parts]


class Rank:
    """A rank's graphs and buffers; follows orders."""

    def __init__(self, bundle: Bundle, executor: Executor) -> None:
        self.executor, self.buffers = executor, dict[int, Tensor]()
        self._graphs = {graph.name: graph for graph in bundle.manifest.graphs_of("ge")}

    def obey(self, order: Order) -> dict[str, NDArray]:
        """The small outputs of a launch; nothing of all else."""
        if isinstance(order, Make):
            self.buffers[order.key] = self.executor.zeros(order.shape)
        elif isinstance(order, Drop):
            for key in order.keys:
                del self.buffers[key]
        elif isinstance(order, Copy):
            self._part(order.into).copy_(self._part(order.source))
        elif isinstance(order, Gather):
            self.gather(order)
        elif isinstance(order, LaunchOrder):
            inputs = {name: array.value for name, array in order.inputs.items()}
            buffers = {name: self._part(view) for name, view in order.buffers.items()}
            return self.executor.run(self._graphs[order.graph], inputs, buffers)
        return {}

    def gather(self, order: Gather) -> list[Tensor]:
        """The part of every rank."""
        return _gathered([self._part(order.part)])

    def _part(self, view: View) -> Tensor:
        return self.buffers[view.key].as_strided(view.shape, view.strides, view.offset)


class SharedBuffer:
    """A part of a buffer that every rank has one of; ``own`` is that of rank 0."""

    def __init__(self, ranks: Ranks, key: int, own: Tensor, whole: SharedBuffer | None = None) -> None:
        # The whole lives as long as any part of it.
        self._ranks, self._key, self.own, self._whole = ranks, key, own, whole

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.own.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of one rank."""
        return self.own.nbytes

    @property
    def itemsize(self) -> int:
        return self.own.itemsize

    @property
    def view(self) -> View:
        """How a rank finds it."""
        return View(self._key, self.shape, self.own.stride(), int(self.own.storage_offset()))

    @property
    def parts(self) -> list[Tensor]:
        """Of all ranks."""
        return self._ranks.gather(Gather(self.view))

    def reshape(self, shape: tuple[int, ...]) -> SharedBuffer:
        return self._seen(self.own.view(shape))

    def ravel(self) -> SharedBuffer:
        return self._seen(self.own.view(-1))

    def swapaxes(self, one: int, other: int) -> SharedBuffer:
        return self._seen(self.own.swapaxes(one, other))

    def __getitem__(self, place: Any) -> SharedBuffer:
        return self._seen(self.own[place])

    def __setitem__(self, place: Any, value: SharedBuffer | Literal[0]) -> None:
        into = self[place]
        source = value if isinstance(value, SharedBuffer) else self._ranks.zeros(into.shape)
        self._ranks.tell(Copy(into.view, source.view))

    def _seen(self, own: Tensor) -> SharedBuffer:
        return SharedBuffer(self._ranks, self._key, own, self)


class Ranks:
    """All ranks as one executor, in the process of rank 0.

    Raises from any call:
        BundleError: another rank has ended, or does not come to a collective.
    """

    def __init__(self, bundle: Bundle, rank: Rank, orders: Orders) -> None:
        self._bundle, self._rank, self._orders = bundle, rank, orders
        self._buffers, self._gone = 0, list[int]()
        self._end = finalize(self, _stop, orders)

    def zeros(self, shape: tuple[int, ...]) -> SharedBuffer:
        """A buffer of zeros on every rank."""
        self._buffers += 1
        key = self._buffers
        self.tell(Make(key, shape))
        buffer = SharedBuffer(self, key, self._rank.buffers[key])
        finalize(buffer, self._gone.append, key)
        return buffer

    def run(
        self, graph: GraphSignature, inputs: Mapping[str, NDArray], buffers: Mapping[str, SharedBuffer]
    ) -> dict[str, NDArray]:
        """See `draftwood.runtime.engines.executor.Executor.run`."""
        arrays = {name: ArrayBytes.of(value) for name, value in inputs.items()}
        return self.tell(LaunchOrder(graph.name, arrays, {name: buffer.view for name, buffer in buffers.items()}))

    def read(self, buffer: SharedBuffer) -> NDArray[np.float32]:
        """See `draftwood.runtime.engines.executor.Executor.read`; of rank 0, whose outputs are those of all."""
        return self._rank.executor.read(buffer.own)

    def tell(self, order: Order) -> dict[str, NDArray]:
        """Has every rank do it; returns rank 0's result."""
        return self._together(order, self._rank.obey)

    def gather(self, order: Gather) -> list[Tensor]:
        """A part of a buffer of every rank."""
        return self._together(order, self._rank.gather)

    def close(self) -> None:
        """Ends the other ranks."""
        self._end()

    def _together(self, order: Any, own: Callable[[Any], Any]) -> Any:
        if self._gone:
            gone = self._gone[:]
            del self._gone[: len(gone)]
            self.tell(Drop(gone))
        try:
            self._orders.send(order)
            return own(order)
        except RuntimeError as error:
            if not _is_loss(error):
                raise
            self._end.detach()
            TOLD.acquire()
            raise BundleError(
                f"{self._bundle.folder}: another rank has ended, or did not come to a collective within"
                f" {PATIENCE.seconds} s; all end; torchrun's report names the first that failed"
            ) from error


def _is_loss(error: Exception) -> bool:
    """Whether another rank is gone; gloo's errors have no class of their own."""
    return isinstance(error, distributed.DistError) or "gloo" in str(error)


def tell_at_the_end(folder: Path) -> Thread:
    """Has rank 0 say in one line that torchrun ends it, which it does as soon as another has failed.

    Whatever it waits for then: the line is a thread's, which Python's own handler of signals wakes. With the lock
    ``TOLD`` the main thread says its own line instead, and the thread ends.
    """
    ends, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.set_wakeup_fd(woken)

    def wait() -> None:
        while os.read(ends, 1) != bytes([signal.SIGTERM]):
            pass  # another signal
        # If the main thread has the lock, it is on its way out, and an exit here might come before its line.
        if TOLD.acquire(blocking=False):
            line = "torchrun ends all ranks, because one has ended; its report names the first that failed"
            os.write(2, f"draftwood: error: {folder}: {line}\n".encode())
            os._exit(1)

    thread = Thread(target=wait, daemon=True)
    thread.start()
    return thread


def _stop(orders: Orders) -> None:
    with suppress(RuntimeError):  # a rank that is gone needs no word
        orders.send(Stop())
    distributed.destroy_process_group()


class RanksEngine(Held, StaticEngine):
    """Decodes with the NPU's graphs of all ranks; in any process but that of rank 0 it never returns.

    Raises:
        RequestError: torchrun did not start this process, or started another number of them.
        BundleError: the bundle holds no graphs for an NPU.
    """

    executor: Ranks

    def __init__(self, bundle: Bundle, opening: Opening = USUAL, local: Local = local_executor) -> None:
        self.ranks, npus = bundle.npu_graphs().ranks, npu_count()
        rank = _own_number(bundle.folder, self.ranks, npus)
        torch.set_num_threads(max(counted_threads(opening.threads) // self.ranks, 1))
        executor = local(bundle, rank)  # which loads torch_npu, if there is one
        distributed.init_process_group("hccl" if npus else "gloo", timeout=PATIENCE)
        local_rank, orders = Rank(bundle, executor), Orders(PATIENCE)
        if rank:
            _follow(local_rank, orders, rank)
        tell_at_the_end(bundle.folder)
        super().__init__(bundle, bundle.manifest.graphs_of("ge"), Ranks(bundle, local_rank, orders))

    def close(self) -> None:
        super().close()
        self.executor.close()


def _own_number(folder: Path, ranks: int, npus: int) -> int:
    """This process's rank; the ranks are all of one machine, each on an NPU of its own if there is one."""
    started_ranks, rank = os.environ.get("WORLD_SIZE"), int(os.environ.get("RANK", 0))
    if started_ranks != str(ranks):
        if rank:
            sys.exit(2)  # rank 0 says why
        started = f"torchrun started {started_ranks}" if started_ranks else "torchrun did not start this process"
        raise RequestError(
            f"--engine ranks: {folder} is of {ranks} ranks, and {started}; start it as torchrun --standalone"
            f" --nproc-per-node {ranks} -m -- draftwood.tools.cli ..."
        )
    if 0 < npus < ranks:
        if rank:
            sys.exit(2)
        raise RequestError(
            f"--engine ranks: {folder} is of {ranks} ranks, a device each, and torch_npu finds {npus} here; look at"
            " ASCEND_RT_VISIBLE_DEVICES, or build it for fewer"
        )
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # to whatever this machine's name resolves
    # HCCL waits for two minutes, inside a rank's first launch; another may still compile its own.
    os.environ.setdefault("HCCL_CONNECT_TIMEOUT", str(PATIENCE.seconds))
    return rank


def _follow(own: Rank, orders: Orders, rank: int) -> None:
    """Follows rank 0's orders; ends this process with it."""
    try:
        while not isinstance(order := orders.receive(), Stop):
            own.obey(order)
    except Exception as error:  # for any reason: without this rank the others end as well
        if not _is_loss(error):
            print(f"draftwood: error: rank {rank}: {type(error).__name__}: {error}".partition("\n")[0], file=sys.stderr)
        sys.exit(1)
    distributed.destroy_process_group()
    sys.exit(0)
