"""One process or several (torchrun): the texts of each, and sums over all of them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor, distributed

# The longest that processes wait for one of them: the first writes prompts and looks at held-out texts alone, which may
# take hours. If one ends, torchrun ends all.
_PATIENCE = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Team:
    """This process's number and how many there are; alone it is number 0 of 1, and every call costs nothing."""

    rank: int = 0
    size: int = 1

    @classmethod
    @contextmanager
    def join(cls, device: torch.device) -> Iterator[Team]:
        """The processes that torchrun started with this one, each on such a device; NCCL on GPUs, gloo elsewhere."""
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            yield cls()
            return
        if device.type == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        distributed.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=_PATIENCE)
        try:
            yield cls(distributed.get_rank(), distributed.get_world_size())
        finally:
            distributed.destroy_process_group()

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Replaces each tensor by its sum over all processes."""
        if self.size == 1 or not tensors:
            return
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        distributed.all_reduce(flat)
        for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))

    def wait(self) -> None:
        """Until all processes are here."""
        if self.size > 1:
            distributed.barrier()
