"""What the fused attention of the NPU at hand can do, found out by trying: versions and documents contradict it.

Each probe runs a small attention whose result tells a mask that is honoured from one that is not.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from draftwood.compiler.ge.torchair_bridge import device_of
from draftwood.kernels import eager_attention
from draftwood.tools.lab.acl_probe import Verdict

# N query heads, K key/value heads, T rows, C slots, D head dimension
HEADS, KV_HEADS, DIM = 8, 2, 128
# bf16 and another order of sums; an ignored mask moves the result by 1e-1 and more.
TOLERANCE = 3e-2

Attention = Callable[..., Any]


def probe(device: str = "npu:0", attention: Attention | None = None) -> list[Verdict]:
    """All verdicts; ``attention`` stands in for the operator in tests."""
    run = attention or _operator(device)
    return [
        _verdict("one row with a mask past 512 slots", _masked, run, device, rows=1, slots=1024),
        _verdict("tree rows with a mask (sparse_mode 1)", _masked, run, device, rows=16, slots=1024),
        _verdict("17 tree rows with a mask", _masked, run, device, rows=17, slots=1024),
        _verdict("tree mask of rows alone (sparse_mode 9)", _tree_masked, run, device, rows=16, slots=1024),
        _verdict("lengths of keys as a tensor", _tensor_lengths, run, device, rows=2, slots=1024),
    ]


def _operator(device: str) -> Attention:
    device_of(device)  # loads torch_npu, which registers it
    return torch.ops.npu.npu_fused_infer_attention_score


def _verdict(ability: str, trial: Callable[..., Tensor], run: Attention, device: str, rows: int, slots: int) -> Verdict:
    try:
        difference = float(trial(run, device, rows, slots))
    except Exception as error:  # an operator that refuses raises classes of every kind
        return Verdict(ability, False, (str(error).strip().splitlines() or [type(error).__name__])[0][:200])
    return Verdict(ability, difference <= TOLERANCE, f"differs by {difference:.1e}")


def _case(rows: int, slots: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(0)
    for heads, length in ((HEADS, rows), (KV_HEADS, slots), (KV_HEADS, slots)):
        yield torch.randn((1, heads, length, DIM), generator=generator, dtype=torch.float32).to(torch.bfloat16)


def _apart(got: Any, want: Tensor) -> Tensor:
    return (got[0].cpu().float() - want.float()).abs().max()


def _call(run: Attention, device: str, tensors: list[Tensor], mask: Tensor | None, **options: Any) -> Any:
    query, key, value = (tensor.to(device) for tensor in tensors)
    return run(
        query,
        key,
        value,
        atten_mask=None if mask is None else mask.to(device),
        num_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        scale=DIM**-0.5,
        input_layout="BNSD",
        **options,
    )


def _masked(run: Attention, device: str, rows: int, slots: int) -> Tensor:
    """Every row sees half of the slots, another half each."""
    tensors = list(_case(rows, slots))
    masked = (torch.arange(slots) + torch.arange(rows)[:, None]) % 2 == 0
    want = eager_attention(tensors[0], tensors[1], tensors[2], masked[None, None], DIM**-0.5)
    return _apart(_call(run, device, tensors, masked[None, None], sparse_mode=1), want)


def _tree_masked(run: Attention, device: str, rows: int, slots: int) -> Tensor:
    """The last rows of the keys are the tree: row i sees itself and every second row before it."""
    tensors = list(_case(rows, slots))
    order = torch.arange(rows)
    tree = (order[None] > order[:, None]) | ((order[:, None] - order[None]) % 2 == 1)
    full = torch.zeros((rows, slots), dtype=torch.bool)
    full[:, slots - rows :] = tree
    want = eager_attention(tensors[0], tensors[1], tensors[2], full[None, None], DIM**-0.5)
    return _apart(_call(run, device, tensors, tree[None], sparse_mode=9), want)


def _tensor_lengths(run: Attention, device: str, rows: int, slots: int) -> Tensor:
    """Half of the slots are valid, which a tensor on the device says."""
    tensors, valid = list(_case(rows, slots)), slots // 2
    masked = (torch.arange(slots) >= valid).expand(rows, slots)
    want = eager_attention(tensors[0], tensors[1], tensors[2], masked[None, None], DIM**-0.5)
    lengths = torch.tensor([valid], device=device)
    return _apart(_call(run, device, tensors, None, actual_seq_lengths_kv=lengths), want)


if __name__ == "__main__":
    print(json.dumps([asdict(verdict) for verdict in probe()]))
