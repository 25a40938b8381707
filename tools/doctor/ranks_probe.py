"""Whether two devices add up each other's values, over HCCL; started twice by ``torchrun``, the first prints the
verdict."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from datetime import timedelta

import torch
import torch.distributed as dist

from draftwood.compiler.ge.torchair_bridge import device_of
from draftwood.tools.doctor.acl_probe import Verdict


def verdict(backend: str) -> Verdict:
    """The sum and the gathered rows of two ranks; ``backend`` is gloo if there is no device."""
    rank = int(os.environ["RANK"])
    device = device_of(f"npu:{os.environ['LOCAL_RANK']}" if backend == "hccl" else "cpu")
    dist.init_process_group(backend, timeout=timedelta(seconds=60))
    rows = torch.full((13, 512), rank + 1.0, device=device, dtype=torch.bfloat16)
    total, parts = rows.clone(), [torch.empty_like(rows) for _ in range(2)]
    dist.all_reduce(total)
    dist.all_gather(parts, rows)
    dist.destroy_process_group()
    got = float(total.float().mean()), [float(part.float().mean()) for part in parts]
    return Verdict(f"two devices over {backend}", got == (3.0, [1.0, 2.0]), f"sum {got[0]}, parts {got[1]}")


if __name__ == "__main__":
    result = verdict(sys.argv[1])
    if os.environ["RANK"] == "0":
        print(json.dumps([asdict(result)]))
