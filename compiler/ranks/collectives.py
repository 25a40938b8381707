"""The exchange between devices inside a step: two functional collectives of PyTorch, over the group of all ranks.

torchair converts them to HcomAllReduce and HcomAllGather; on a CPU gloo executes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, distributed

# Of the default process group; a traced program names its group by it.
GROUP = "0"


def summed(x: Tensor) -> Tensor:
    """The sum over all ranks, the same on each; x's shape."""
    functional = torch.ops._c10d_functional
    return functional.wait_tensor(functional.all_reduce(x, "sum", GROUP))


def gathered(x_TU: Tensor, ranks: int, width: int) -> Tensor:
    """Rows [T, U] of all ranks side by side, the same on each; the first ``width`` columns [T, width] of them."""
    functional = torch.ops._c10d_functional
    x_NTU = functional.wait_tensor(functional.all_gather_into_tensor(x_TU, ranks, GROUP)).view(ranks, *x_TU.shape)
    joined = x_NTU.transpose(0, 1).flatten(1)
    return joined if joined.shape[1] == width else joined[:, :width]


@contextmanager
def group_of(ranks: int) -> Iterator[None]:
    """In the body a process group of ``ranks`` ranks exists, by whose name a graph is converted; nothing is sent.

    A group that is there already, as on a device, stays the one.
    """
    if ranks == 1 or distributed.is_initialized():
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        distributed.destroy_process_group()
