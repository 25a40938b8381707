"""The cost of a step when several devices run it together: the operators of one of them, and the collectives between.

The split layers stand as in the plan of the weights, by name. Loads shrink by the number of devices, but those of the
attention and the caches by the key/value heads that a device has. A product's results are then joined.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from draftwood.compiler.device.operators import BYTES, Op
from draftwood.compiler.teachers.config import TeacherConfig
from draftwood.manifest import heads_of_rank

# Names of products whose devices' results stay separate, are added up, or are put side by side.
_APART = ("qkv", "gate up", "known rows", "experts gate up", "experts down")
_SUMMED = ("o", "down")
_GATHERED = ("head", "features", "entry", "block")
# Element work on heads or on the feed-forward's width, and the attention with its caches.
_ELEMENTS = ("split", "head norms", "rotary", "transpose", "swiglu")
_CACHES = ("attention", "scatter", "moved and new keys", "branch")
_EMBEDDING = "embedding"
# In a mixture the devices add up the sum over a row's experts.
_MIXED = "weighed sum"


def on_ranks(ops: Iterable[Op], config: TeacherConfig, ranks: int) -> list[Op]:
    """The operators that one of ``ranks`` devices runs of a step."""
    if ranks == 1:
        return list(ops)
    heads = heads_of_rank(config.kv_heads, ranks) / config.kv_heads
    result: list[Op] = []
    for op in ops:
        if op.name in (*_APART, *_SUMMED, *_GATHERED, *_ELEMENTS):
            result.append(_scaled(op, 1 / ranks))
        elif op.name in _CACHES:
            result.append(_scaled(op, heads))
        else:
            result.append(op)
        if op.name in (*_SUMMED, _MIXED):
            result.append(all_reduce(op.result, ranks, op.count))
        elif op.name in _GATHERED:
            result += [all_gather(op.result, ranks, op.count), _turned(op)]
        elif op.name.startswith(_EMBEDDING):
            result.append(all_reduce(op.count * op.memory / 2, ranks))
    return result


def all_reduce(size: float, ranks: int, count: int = 1) -> Op:
    """Adds up ``size`` bytes of every device, by the cheaper of ring and doubling: both are weighed by the device.

    Ring: 2 (N - 1) hops of a share of 1 / N; doubling: 2 log2 N hops, and all of it twice.
    """
    return Op(
        name="all-reduce",
        engine="link",
        count=count,
        ranks=ranks,
        sent=((2 * (ranks - 1), 2 * (ranks - 1) / ranks * size), (2 * math.log2(ranks), 2 * size)),
    )


def all_gather(size: float, ranks: int, count: int = 1) -> Op:
    """Puts ``size`` bytes together of equal parts of every device: log2 N hops, and the bytes of the others."""
    return Op(
        name="all-gather",
        engine="link",
        count=count,
        ranks=ranks,
        sent=((math.log2(ranks), (ranks - 1) / ranks * size),),
    )


def _scaled(op: Op, share: float) -> Op:
    return replace(
        op,
        memory=op.memory * share,
        exchange=op.exchange * share,
        cube=op.cube * share,
        vector=op.vector * share,
    )


def _turned(op: Op) -> Op:
    """Turns gathered parts, device by device, into rows."""
    return Op(name="transpose", engine="vector", count=op.count, memory=2 * op.result, vector=op.result / BYTES)
