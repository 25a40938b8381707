"""The parts of a step: operators and their loads, as this project's graphs have them in bf16."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from draftwood.compiler.device.constants import ELEMENT_WORK, FRACTAL_ROWS, SCORE_BYTES
from draftwood.compiler.teachers.config import PackedLayer, TeacherConfig
from draftwood.kernels.int4 import DIGITS, most_rows

# T rows of a step, C cache slots, G query heads a key/value head, K key/value heads

BYTES = 2  # of a bf16 element
# Where the tiling of a fused attention was read.
TILING = "cannmirror/ops-transformer 9.1.0, attention/common/op_host/arch22/fia_tiling_nonquant.cpp"
# Rows of the largest M tile by the length of the inner KV tile, and the inner tile by group: see `attention_tiles`.
_M_TILES = ((512, 512), (1024, 256), (2048, 128), (4096, 64), (8192, 32))
_WIDE_ROWS = 16  # above this many query rows the kernel tiles the KV axis by 512

Engine = Literal["matmul", "attention", "vector", "link"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One operator and how often it runs; loads are of one run."""

    name: str
    engine: Engine
    count: int = 1
    # Bytes from and to HBM.
    memory: float = 0.0
    # Bytes between cube and vector cores, through L2.
    exchange: float = 0.0
    # FLOP of the cube and of the vector cores.
    cube: float = 0.0
    vector: float = 0.0
    # Bytes of weights among the memory, and rows that a fractal is padded from; 0 of an operator without weights.
    weights: float = 0.0
    rows: int = 0
    # Bytes of a matrix product's results, on all devices together.
    result: float = 0.0
    # Of a collective: the number of devices, and for each way to do it (hops, bytes that a device sends).
    ranks: int = 1
    sent: tuple[tuple[float, float], ...] = ()


def matmul(name: str, rows: int, inner: int, outer: int, count: int = 1, width: int = BYTES) -> Op:
    """[rows, inner] times weights [inner, outer] of ``width`` bytes: streamed once, rows are padded to fractals."""
    weights = float(width * inner * outer)
    memory = weights + BYTES * rows * (inner + outer)
    cube, result = 2.0 * _fractals(rows) * inner * outer, float(BYTES * rows * outer)
    return Op(
        name=name, engine="matmul", count=count, memory=memory, weights=weights, rows=rows, cube=cube, result=result
    )


def of_texts(ops: Iterable[Op], texts: int) -> list[Op]:
    """The operators of one text's step for ``texts`` of them in one launch.

    All rows pass the weights once, padded to fractals together. All else is each text's own, its keys and values too:
    loads grow with the texts, fixed costs do not. That one attention kernel is as near its peak for several texts as
    for one is assumed.
    """
    return [_of_texts(op, texts) for op in ops]


def _of_texts(op: Op, texts: int) -> Op:
    padding = _fractals(texts * op.rows) / _fractals(op.rows) if op.rows else texts
    return replace(
        op,
        memory=op.weights + texts * (op.memory - op.weights),
        exchange=texts * op.exchange,
        cube=padding * op.cube,
        vector=texts * op.vector,
        rows=texts * op.rows,
        result=texts * op.result,
    )


def elementwise(name: str, elements: float, operands: int, count: int = 1) -> Op:
    """A vector operator over `elements`, which reads and writes `operands` tensors of that size."""
    work = ELEMENT_WORK.value * elements
    return Op(name=name, engine="vector", count=count, memory=BYTES * operands * elements, vector=work)


def copy(name: str, elements: float, count: int = 1, width: int = BYTES) -> Op:
    """A vector operator that only moves `elements` of `width` bytes."""
    return Op(name=name, engine="vector", count=count, memory=2.0 * width * elements)


def attention_tiles(group: int, rows: int, slots: int) -> int:
    """How often a fused attention streams the keys and values: the M tiles of its score product.

    M is the G x T query rows of a key/value head. Up to 16 query rows the kernel tiles the KV axis by 8192, 4096 or
    2048 (G below 5, below 10, else), at most by the KV length. The longer that tile, the fewer rows fit next to it.
    Above 16 rows both tiles are 512. Source: ``TILING``.
    """
    longest = 8192 if group < 5 else 4096 if group < 10 else 2048
    inner = 512 if rows > _WIDE_ROWS else min(longest, slots)
    tile = next(rows for length, rows in _M_TILES if inner <= length)
    return math.ceil(group * rows / tile)


def attention(config: TeacherConfig, rows: int, slots: int) -> Op:
    """Fused attention of `rows` rows over all `slots` slots: the mask hides empty slots, but they are read anyway.

    Every M tile is taken to stream keys and values from HBM anew; that L2 may still hold them is not counted.
    """
    heads, kv_heads, width = config.heads, config.kv_heads, config.head_dim
    group = heads // kv_heads
    streamed = attention_tiles(group, rows, slots) * 2 * kv_heads * slots * width * BYTES
    mask = kv_heads * rows * slots  # one byte an entry, read for every key/value head
    padded = _fractals(group * rows)
    return Op(
        name="attention",
        engine="attention",
        memory=streamed + mask + 2 * BYTES * rows * heads * width,
        exchange=SCORE_BYTES.value * heads * rows * slots,
        cube=2 * 2.0 * kv_heads * padded * slots * width,
        vector=ELEMENT_WORK.value * heads * rows * slots,
    )


def products(
    name: str, rows: int, inner: int, outer: int, quantised: bool, rounded: bool = False, count: int = 1
) -> list[Op]:
    """A linear layer; a quantised one rounds its rows first, unless they come ``rounded`` from the operator before it.

    The cube counts at its bf16 peak, half of that of int8.
    """
    if not quantised:
        return [matmul(name, rows, inner, outer, count)]
    product = matmul(name, rows, inner, outer, count, width=1)
    return [product] if rounded else [rows_of(name, rows, inner, count), product]


def int4_product(name: str, rows: int, inner: int, outer: int, layer: PackedLayer) -> Op:
    """A linear layer of packed weights in groups, as `draftwood.compiler.ge.operators.int4` describes its two kernels.

    With rows in digits the cube hands over a sum in int32 for every digit, group and output. With more rows the vector
    cores hand over all weights in a half type. The cube counts at its bf16 peak, a quarter of that of int4.
    """
    assert layer.group, layer.name
    weights = inner * outer * (0.5 + BYTES * (1 + layer.zeros) / layer.group)
    sums = rows * outer * inner / layer.group
    if cut := rows <= most_rows(layer.group):
        exchange, vector = 2 * 4 * DIGITS * sums, ELEMENT_WORK.value * sums
    else:
        exchange, vector = 2.0 * BYTES * inner * outer, 2.0 * inner * outer
    total = DIGITS * rows if cut else rows
    return Op(
        name=name,
        engine="matmul",
        memory=weights + BYTES * rows * (inner + outer),
        exchange=exchange,
        cube=2.0 * _fractals(total) * inner * outer,
        vector=vector,
        weights=weights,
        rows=total,
        result=float(BYTES * rows * outer),
    )


def rows_of(name: str, rows: int, inner: int, count: int = 1) -> Op:
    """Rounds the rows of a quantised layer."""
    return elementwise(f"{name} rows", rows * inner, 2, count)


def ranking(rows: int, vocabulary: int) -> list[Op]:
    """Top-k and log-sum-exp of `rows` rows of logits."""
    return [elementwise("top-k", rows * vocabulary, 1), elementwise("log-sum-exp", rows * vocabulary, 1, count=2)]


def _fractals(rows: int) -> int:
    """Rows padded to whole fractals."""
    return math.ceil(rows / FRACTAL_ROWS.value) * int(FRACTAL_ROWS.value)
