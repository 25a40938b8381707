"""How long a step takes on an Ascend device that is not here: an analytic model, every constant with its source.

A step is a list of operators. Each takes the longest of its memory traffic, its matrix work, its vector work and
what its two kinds of core exchange, plus a fixed cost on the device; one after the other, as in one stream of a
static graph. The host launches the graph as a whole, so operators cost no launch. The result is a latency table
in the format of measured ones, marked as modelled.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, Protocol

from draftwood.compiler.teachers.config import TeacherConfig
from draftwood.errors import RequestError
from draftwood.trees.latency import Constant, EntryKind, LatencyEntry, LatencyTable, Mark

# T rows of a step, C cache slots, G query heads a key/value head, H hidden, I intermediate, V vocabulary,
# N query heads, K key/value heads, D head dimension

_MSMODELING = "Ascend/msmodeling, tensor_cast/device.py, profile"
_TILING = "cannmirror/ops-transformer 9.1.0, attention/common/op_host/arch22/fia_tiling_nonquant.cpp"

CUBE_EFFICIENCY = Constant(
    name="cube efficiency",
    value=0.7,
    unit="of peak",
    mark="vendor simulator",
    source="Ascend/msmodeling, tensor_cast/device.py: compute_efficiency, said there to need calibration",
)
MEMORY_EFFICIENCY = Constant(
    name="memory efficiency",
    value=0.6,
    unit="of peak",
    mark="vendor simulator",
    source="Ascend/msmodeling, tensor_cast/device.py: memory_efficiency, said there to need calibration",
)
CUBE_OVERHEAD = Constant(
    name="fixed cost of an operator with matrix work",
    value=5e-6,
    unit="s",
    mark="vendor simulator",
    source="Ascend/msmodeling, tensor_cast/device.py: mma_op_cost_s, said there to need confirmation",
)
VECTOR_OVERHEAD = Constant(
    name="fixed cost of a vector operator",
    value=2e-6,
    unit="s",
    mark="vendor simulator",
    source="Ascend/msmodeling, tensor_cast/device.py: gp_op_cost_s, said there to need confirmation",
)
FRACTAL_ROWS = Constant(
    name="rows a matrix product is padded to",
    value=16,
    unit="rows",
    mark="public document",
    source="Ascend C guide: the cube works on 16 x 16 fractals of fp16 or bf16",
)
L2_RATIO = Constant(
    name="L2 bandwidth over HBM bandwidth",
    value=5,
    unit="times",
    mark="code",
    source="hicann/catlass, include/acot/arch/arch.hpp",
)
SCORE_BYTES = Constant(
    name="bytes of a score that pass between cube and vector cores",
    value=12,
    unit="bytes",
    mark="assumption",
    source="scores in fp32 and probabilities in bf16, each written once and read once through L2, because the two"
    " kinds of core share no buffer (Ascend C architecture guide)",
)
ELEMENT_WORK = Constant(
    name="vector work per element of a norm, softmax, activation or argmax",
    value=8,
    unit="FLOP",
    mark="assumption",
    source="order of magnitude; where it decides, the result is no better than a factor of two",
)
MOVED_ROWS = Constant(
    name="accepted rows that a step writes into place",
    value=8,
    unit="rows",
    mark="assumption",
    source="deferred commit moves at most depth + 1 rows inside the step's own cache write",
)
INPUT_SECONDS = Constant(
    name="host: copying a step's inputs to the device",
    value=5e-5,
    unit="s",
    mark="public document",
    source="fengz72/qwen2.5-varlen-npu, latency_benchmark.md: 0.05 ms, .om of a 0.5B model on Ascend910_9382",
)
OUTPUT_SECONDS = Constant(
    name="host: copying a step's results back",
    value=1.1e-4,
    unit="s",
    mark="public document",
    source="fengz72/qwen2.5-varlen-npu, latency_benchmark.md: 0.11 ms for 3 MB of logits; choices alone are less",
)
COMMON = (
    *(CUBE_EFFICIENCY, MEMORY_EFFICIENCY, CUBE_OVERHEAD, VECTOR_OVERHEAD, FRACTAL_ROWS, L2_RATIO),
    *(SCORE_BYTES, ELEMENT_WORK, MOVED_ROWS, INPUT_SECONDS, OUTPUT_SECONDS),
)
# Rows of the largest M tile by the length of the inner KV tile, and the inner tile by group: see `attention_tiles`.
_M_TILES = ((512, 512), (1024, 256), (2048, 128), (4096, 64), (8192, 32))
_WIDE_ROWS = 16  # above this many query rows the kernel tiles the KV axis by 512
_BYTES = 2  # of a bf16 element
_PLACE_OPS = 15  # small operators that compute cache rows and the mask, as this project's decoder traces them

Engine = Literal["matmul", "attention", "vector"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Peak figures of one device; a 910C counts as one of its two dies."""

    name: str
    # As ATC's --soc_version wants it.
    soc: str
    # Matrix units, bf16, and vector units, fp16, in FLOP/s.
    cube: float
    vector: float
    # HBM, in bytes/s and bytes.
    bandwidth: float
    memory: int
    # Where the figures come from.
    profile: str
    mark: Mark

    def seconds(self, op: Op) -> float:
        """One run of `op` without its fixed cost: whichever of its four loads takes longest."""
        hbm = self.bandwidth * MEMORY_EFFICIENCY.value
        return max(
            op.memory / hbm,
            op.exchange / (hbm * L2_RATIO.value),
            op.cube / (self.cube * CUBE_EFFICIENCY.value),
            op.vector / (self.vector * CUBE_EFFICIENCY.value),
        )

    def streams(self, op: Op) -> bool:
        """Whether a matrix product waits for its weights rather than for the cube."""
        return op.memory / (self.bandwidth * MEMORY_EFFICIENCY.value) >= op.cube / (self.cube * CUBE_EFFICIENCY.value)

    def constants(self) -> tuple[Constant, ...]:
        """This device's figures, as a table lists them."""
        figures = {
            "bf16 peak of the cube": (self.cube, "FLOP/s"),
            "fp16 peak of the vector cores": (self.vector, "FLOP/s"),
            "peak memory bandwidth": (self.bandwidth, "bytes/s"),
        }
        return tuple(
            Constant(name=name, value=value, unit=unit, mark=self.mark, source=self.profile)
            for name, (value, unit) in figures.items()
        )


_TIB, _GIB = 2**40, 2**30
_STAND_IN = "no public profile of it was found: the figures of the 910B2, the next smaller part, stand in for it"
_SPECS: tuple[tuple[str, str, float, float, float, int, str, Mark], ...] = (
    # name, soc, cube and vector in TFLOPS, TiB/s, GiB, profile, mark
    ("ascend-910b1", "Ascend910B1", 353.9, 22, 1.6, 64, _STAND_IN, "assumption"),
    ("ascend-910b2", "Ascend910B2", 353.9, 22, 1.6, 64, f"{_MSMODELING} A2_376T_64G", "vendor simulator"),
    ("ascend-910b3", "Ascend910B3", 294.9, 18, 1.6, 64, f"{_MSMODELING} A2_313T_64G", "vendor simulator"),
    ("ascend-910b4", "Ascend910B4", 245.8, 16, 0.8, 32, f"{_MSMODELING} A2_280T_32G_PCIE", "vendor simulator"),
    ("ascend-910c", "Ascend910_9391", 353.9, 22, 1.6, 64, f"{_MSMODELING} A3_752T_128G_DIE", "vendor simulator"),
)
_DEVICES = (
    Device(
        name=name,
        soc=soc,
        cube=cube * 1e12,
        vector=vector * 1e12,
        bandwidth=bandwidth * _TIB,
        memory=memory * _GIB,
        profile=profile,
        mark=mark,
    )
    for name, soc, cube, vector, bandwidth, memory, profile, mark in _SPECS
)
DEVICES = {device.name: device for device in _DEVICES}


def device(name: str) -> Device:
    """The device of a name; RequestError lists them."""
    if name not in DEVICES:
        raise RequestError(f"--device {name}: not known; expected one of {', '.join(DEVICES)}")
    return DEVICES[name]


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


def matmul(name: str, rows: int, inner: int, outer: int, count: int = 1) -> Op:
    """[rows, inner] times weights [inner, outer]: the weights are streamed once, rows are padded to fractals."""
    memory = _BYTES * (inner * outer + rows * (inner + outer))
    return Op(name=name, engine="matmul", count=count, memory=memory, cube=2.0 * _fractals(rows) * inner * outer)


def elementwise(name: str, elements: float, operands: int, count: int = 1) -> Op:
    """A vector operator over `elements`, which reads and writes `operands` tensors of that size."""
    work = ELEMENT_WORK.value * elements
    return Op(name=name, engine="vector", count=count, memory=_BYTES * operands * elements, vector=work)


def copy(name: str, elements: float, count: int = 1, width: int = _BYTES) -> Op:
    """A vector operator that only moves `elements` of `width` bytes."""
    return Op(name=name, engine="vector", count=count, memory=2.0 * width * elements)


def attention_tiles(group: int, rows: int, slots: int) -> int:
    """How often a fused attention streams the keys and values: the M tiles of its score product.

    M is the G x T query rows of a key/value head. Up to 16 query rows the kernel tiles the KV axis by 8192, 4096
    or 2048 (G below 5, below 10, else), at most by the KV length, and the longer that tile the fewer rows fit
    beside it; above 16 rows both tiles are 512. Source: the tiling code named in this module.
    """
    longest = 8192 if group < 5 else 4096 if group < 10 else 2048
    inner = 512 if rows > _WIDE_ROWS else min(longest, slots)
    tile = next(rows for length, rows in _M_TILES if inner <= length)
    return math.ceil(group * rows / tile)


def attention(config: TeacherConfig, rows: int, slots: int) -> Op:
    """Fused attention of `rows` rows over all `slots` slots: the mask hides what is not filled, it is read anyway.

    Every M tile is taken to stream keys and values from HBM anew; that L2 may still hold them is not counted.
    """
    heads, kv_heads, width = config.heads, config.kv_heads, config.head_dim
    group = heads // kv_heads
    streamed = attention_tiles(group, rows, slots) * 2 * kv_heads * slots * width * _BYTES
    mask = kv_heads * rows * slots  # one byte an entry, read for every key/value head
    padded = _fractals(group * rows)
    return Op(
        name="attention",
        engine="attention",
        memory=streamed + mask + 2 * _BYTES * rows * heads * width,
        exchange=SCORE_BYTES.value * heads * rows * slots,
        cube=2 * 2.0 * kv_heads * padded * slots * width,
        vector=ELEMENT_WORK.value * heads * rows * slots,
    )


def layer_ops(config: TeacherConfig, rows: int, slots: int, wide: int = 1) -> list[Op]:
    """One decoder block as this project's decoder writes it; `wide` times the hidden size enters its qkv."""
    H, I = config.hidden, config.intermediate  # noqa: E741
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    written = rows + int(MOVED_ROWS.value)
    return [
        elementwise("norm", rows * H, 2, count=wide),
        matmul("qkv", rows, wide * H, queries + 2 * keys),
        copy("split", rows * (queries + 2 * keys)),
        elementwise("rotary", rows * (queries + keys) / 2, 4, count=2),
        copy("new rows", written * 2 * keys, count=2),
        copy("scatter", written * keys, count=2),
        copy("transpose", rows * queries, count=2),
        attention(config, rows, slots),
        matmul("o", rows, queries, H),
        elementwise("add norm", rows * H, 4),
        matmul("gate up", rows, H, 2 * I),
        elementwise("swiglu", rows * I, 3),
        matmul("down", rows, I, H),
    ]


def step_ops(config: TeacherConfig, rows: int, slots: int, head_rows: int | None = None) -> list[Op]:
    """A whole teacher step: commit and verify of `rows` rows, logits of `head_rows` of them (all where None)."""
    H, V = config.hidden, config.vocabulary
    scored = rows if head_rows is None else head_rows
    branch = config.layers * 2 * config.kv_heads * config.head_dim
    return [
        copy("embedding and rotary rows", rows * (H + 2 * config.head_dim) / 3, count=3),
        copy("cache rows and mask", rows * slots / 3, count=_PLACE_OPS, width=1),
        copy("branch", branch * (rows + MOVED_ROWS.value) / 2, count=2),
        *(replace(op, count=op.count * config.layers) for op in layer_ops(config, rows, slots)),
        elementwise("last norm", scored * H, 4),
        matmul("head", scored, H, V),
        elementwise("argmax", scored * V, 1),
    ]


class Drafter(Protocol):
    """What drafts: one entry's operators for every (depth, width) it can be asked for."""

    @property
    def facts(self) -> dict[str, Any]: ...

    def drafts(self, config: TeacherConfig, slots: int) -> Iterator[tuple[int, int, list[Op]]]:
        """(depth, width, operators of the whole draft); `slots` is the length of a cache of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Medusa:
    """Medusa heads, one graph for all levels: residual blocks, then an output matrix each or the teacher's."""

    levels: int
    blocks: int = 1
    tied: bool = False
    width: int = 16

    @property
    def facts(self) -> dict[str, Any]:
        return {"kind": "medusa", **asdict(self)}

    def drafts(self, config: TeacherConfig, slots: int) -> Iterator[tuple[int, int, list[Op]]]:
        H, V, heads = config.hidden, config.vocabulary, self.levels
        blocks = [matmul("block", 1, H, H, count=heads * self.blocks)]
        blocks += [elementwise("silu and residual", H, 3, count=2 * heads * self.blocks)]
        out = matmul("head", heads, H, V) if self.tied else matmul("head", 1, H, V, count=heads)
        yield self.levels, self.width, [*blocks, out, *_ranking(heads, V)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3:
    """An EAGLE-3 layer: as many passes, one after the other, as levels; `vocabulary` is the draft head's.

    The first pass takes the accepted rows through the feature projection; every further one expands the best
    `width` nodes of a level. (The reference implementation's depth counts the passes after the first.)
    """

    vocabulary: int
    levels: int = 8
    widths: tuple[int, ...] = (1, 4, 8, 16)

    @property
    def facts(self) -> dict[str, Any]:
        return {"kind": "eagle3", "vocabulary": self.vocabulary, "levels": self.levels, "widths": list(self.widths)}

    def drafts(self, config: TeacherConfig, slots: int) -> Iterator[tuple[int, int, list[Op]]]:
        H = config.hidden
        for width in self.widths:
            first = [matmul("features", self.levels + 1, 3 * H, H), *self._pass(config, self.levels + 1, 1, slots)]
            for depth in range(1, self.levels + 1):
                yield depth, width, [*first, *(depth - 1) * self._pass(config, width, width, slots)]

    def _pass(self, config: TeacherConfig, rows: int, scored: int, slots: int) -> list[Op]:
        H, V = config.hidden, self.vocabulary
        return [
            copy("embedding", rows * H),
            *layer_ops(config, rows, slots, wide=2),
            elementwise("last norm", scored * H, 4),
            matmul("head", scored, H, V),
            *_ranking(scored, V),
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class FastEagle:
    """A cascade of layers that drafts all its levels in one pass; one draft head serves every level.

    None makes the layers as wide as the teacher's.
    """

    layers: int
    vocabulary: int
    heads: int | None = None
    kv_heads: int | None = None
    intermediate: int | None = None
    width: int = 16

    @property
    def facts(self) -> dict[str, Any]:
        return {"kind": "fasteagle", **asdict(self)}

    def drafts(self, config: TeacherConfig, slots: int) -> Iterator[tuple[int, int, list[Op]]]:
        own = {name: getattr(self, name) for name in ("heads", "kv_heads", "intermediate")}
        config = replace(config, **{name: size for name, size in own.items() if size is not None})
        H, rows = config.hidden, self.layers + 1
        ops = [matmul("features", rows, 3 * H, H), copy("embedding", rows * H), matmul("entry", rows, 2 * H, H)]
        for _ in range(self.layers):
            ops += layer_ops(config, rows, slots)
        ops += [elementwise("last norm", self.layers * H, 4), matmul("head", self.layers, H, self.vocabulary)]
        yield self.layers, self.width, [*ops, *_ranking(self.layers, self.vocabulary)]


def _ranking(rows: int, vocabulary: int) -> list[Op]:
    """Top-k and log-sum-exp of `rows` rows of logits."""
    return [elementwise("top-k", rows * vocabulary, 1), elementwise("log-sum-exp", rows * vocabulary, 1, count=2)]


def parts(device: Device, ops: Iterable[Op]) -> dict[str, float]:
    """Seconds of `ops` by what they are spent on; they add up to the whole.

    A matrix product counts as ``weights`` where it waits for its weights and as ``compute`` where it waits for
    the cube; ``overhead`` is the operators' fixed cost on the device.
    """
    spent = dict.fromkeys(("weights", "compute", "attention", "vector", "overhead"), 0.0)
    for op in ops:
        fixed = VECTOR_OVERHEAD if op.engine == "vector" else CUBE_OVERHEAD
        part = op.engine if op.engine != "matmul" else "weights" if device.streams(op) else "compute"
        spent[part] += op.count * device.seconds(op)
        spent["overhead"] += op.count * fixed.value
    return spent


def step_s(device: Device, config: TeacherConfig, rows: int, slots: int) -> float:
    """Seconds of a teacher step of `rows` rows at KV length `slots` in a static graph."""
    return math.fsum(parts(device, step_ops(config, rows, slots)).values())


def modelled_table(
    device: Device,
    config: TeacherConfig,
    rows: Sequence[int],
    slots: Sequence[int],
    drafter: Drafter | None = None,
    teacher: Mapping[str, Any] | None = None,
    prefill: Sequence[int] = (),
) -> LatencyTable:
    """The table of a device: a step of every number of rows at every KV length, prefill chunks, drafts, host.

    A shape that does not fit a KV length, its rows and the spare slot, is left out.
    """
    entries: list[LatencyEntry] = []
    for length in slots:
        for count in sorted({count for count in rows if count < length}):
            spent = parts(device, step_ops(config, count, length))
            kind: EntryKind = "decode" if count == 1 else "verify"
            entries.append(_entry(kind, spent, (count, length), graph_bytes(config, count, length)))
        for count in (count for count in prefill if count < length):
            entries.append(_entry("prefill", parts(device, step_ops(config, count, length, 1)), (count, length)))
    for depth, width, ops in drafter.drafts(config, max(slots)) if drafter else ():
        entries.append(_entry("draft", parts(device, ops), (depth, width)))
    entries.append(_entry("host", {"inputs": INPUT_SECONDS.value, "results": OUTPUT_SECONDS.value}))
    return LatencyTable(
        source="modelled",
        kv_read="static",
        entries=tuple(entries),
        machine={"device": device.name, "soc": device.soc, "dtype": "bfloat16", "memory_bytes": device.memory},
        teacher=dict(teacher or {}),
        drafter=drafter.facts if drafter else {},
        notes=NOTES,
        constants=(*device.constants(), *COMMON),
    )


NOTES = (
    "Modelled, not measured: no figure of this table was taken on a device.",
    f"Attention tiles, and with them the step from 16 to 17 rows, follow {_TILING}.",
    "A step attends over all slots of its KV length; the operators are those of this project's decoder in bf16.",
    "The accepted rows are committed inside the step, so there is no commit entry.",
    "bytes counts a graph's own activations and results; what the runtime adds to a graph is not known.",
)


def graph_bytes(config: TeacherConfig, rows: int, slots: int) -> int:
    """Activations and results that one more graph needs; weights and caches are shared. A lower bound."""
    widest = config.hidden * 2 + config.intermediate * 3 + config.vocabulary
    branch = config.layers * 2 * config.kv_heads * config.head_dim
    return rows * (_BYTES * (widest + branch) + slots)


def _entry(
    kind: EntryKind,
    spent: dict[str, float],
    shape: tuple[int, int] = (0, 0),
    bytes: int = 0,
) -> LatencyEntry:
    """An entry of a shape: (rows, slots), of a draft (depth, width)."""
    rows, slots, depth, width = (0, 0, *shape) if kind == "draft" else (*shape, 0, 0)
    return LatencyEntry(
        kind=kind,
        seconds=math.fsum(spent.values()),
        rows=rows,
        slots=slots,
        depth=depth,
        width=width,
        parts=spent,
        bytes=bytes,
    )


def _fractals(rows: int) -> int:
    """Rows padded to whole fractals."""
    return math.ceil(rows / FRACTAL_ROWS.value) * int(FRACTAL_ROWS.value)
