"""The operators of a teacher's step, as this project's decoder writes it, and its time."""

from __future__ import annotations

import math
from dataclasses import replace

from draftwood.compiler.device.constants import MOVED_ROWS
from draftwood.compiler.device.devices import Device, parts
from draftwood.compiler.device.operators import BYTES, Op, attention, copy, elementwise, matmul
from draftwood.compiler.teachers.config import TeacherConfig

# T rows of a step, C cache slots, H hidden, I intermediate, V vocabulary

_PLACE_OPS = 15  # small operators that compute cache rows and the mask, as this project's decoder traces them


def layer_ops(config: TeacherConfig, rows: int, slots: int, wide: int = 1) -> list[Op]:
    """One decoder block as this project's decoder writes it; `wide` times the hidden size enters its qkv."""
    H, I = config.hidden, config.intermediate  # noqa: E741
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    written = rows + int(MOVED_ROWS.value)
    head_norms = elementwise("head norms", rows * (queries + keys) / 2, 2, count=2)
    return [
        elementwise("norm", rows * H, 2, count=wide),
        matmul("qkv", rows, wide * H, queries + 2 * keys),
        copy("split", rows * (queries + 2 * keys)),
        *([head_norms] if config.qk_norm else []),
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


def step_s(device: Device, config: TeacherConfig, rows: int, slots: int) -> float:
    """Seconds of a teacher step of `rows` rows at KV length `slots` in a static graph."""
    return math.fsum(parts(device, step_ops(config, rows, slots)).values())


def graph_bytes(config: TeacherConfig, rows: int, slots: int) -> int:
    """Activations and results that one more graph needs; weights and caches are shared. A lower bound."""
    widest = config.hidden * 2 + config.intermediate * 3 + config.vocabulary
    branch = config.layers * 2 * config.kv_heads * config.head_dim
    return rows * (BYTES * (widest + branch) + slots)
