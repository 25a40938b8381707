"""The operators of a teacher's step, as this project's decoder writes it, and its time."""

from __future__ import annotations

import math
from dataclasses import replace

from draftwood.compiler.device.constants import MOVED_ROWS
from draftwood.compiler.device.devices import DeviceSpec, parts
from draftwood.compiler.device.experts import mixture_ops
from draftwood.compiler.device.operators import (
    BYTES,
    Op,
    attention,
    copy,
    elementwise,
    int4_product,
    of_texts,
    products,
    rows_of,
)
from draftwood.compiler.device.ranks import on_ranks
from draftwood.compiler.teachers.block import turns_whole
from draftwood.compiler.teachers.config import TeacherConfig
from draftwood.compiler.teachers.experts import MixtureConfig
from draftwood.kernels.rounded import swiglu_fits

# T rows of a step, C cache slots, H hidden, I intermediate, V vocabulary

HEAD = "lm_head"
_PLACE_OPS = 11  # small operators that compute positions, cache rows and the mask, as the lowered graphs have them


def layer_ops(config: TeacherConfig, rows: int, slots: int, wide: int = 1, flat: bool = False) -> list[Op]:
    """One decoder block, an entry a kernel of its graph; `wide` times the hidden size enters its qkv.

    The teacher's caches have one row a token. A drafter's are `flat`: nothing is moved into place, but queries and
    results are transposed, and queries and keys are turned one after the other.
    """
    H, I = config.hidden, config.intermediate  # noqa: E741
    return [
        *attention_ops(config, rows, slots, wide, flat),
        *_linear(config, "gate_up", rows, H, 2 * I, rounded=True),
        elementwise("swiglu", rows * I, 3),
        *_linear(config, "down", rows, I, H, rounded=swiglu_fits(I, rows)),
    ]


def attention_ops(config: TeacherConfig, rows: int, slots: int, wide: int = 1, flat: bool = False) -> list[Op]:
    """Of ``layer_ops`` those up to the norm before the MLP."""
    H = config.hidden
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    written = rows + (0 if flat else int(MOVED_ROWS.value))
    whole = not flat and turns_whole(config)
    turned = rows * (queries + (2 if whole else 1) * keys)
    rotary = elementwise("rotary", turned / 2, 4, count=2) if flat else elementwise("rotary", turned, 4)
    # Moved and new rows lie one after the other if operators of their own make both.
    joined = [copy("transpose", rows * queries, count=2)] if flat else [copy("moved and new keys", written * keys)]
    head_norms = elementwise("head norms", rows * (queries + keys) / 2, 2, count=2)
    return [
        elementwise("norm", rows * H, 2, count=wide),
        *_linear(config, "qkv", rows, wide * H, queries + 2 * keys, rounded=wide == 1),
        copy("split", rows * (queries + 2 * keys)),
        *([head_norms] if config.qk_norm else []),
        rotary,
        *([] if whole else joined),
        copy("scatter", written * keys, count=2),
        attention(config, rows, slots),
        *_linear(config, "o", rows, queries, H),
        elementwise("add norm", rows * H, 4),
    ]


def all_layers(config: TeacherConfig, rows: int, slots: int, texts: int = 1) -> list[Op]:
    """Every block of a teacher, for ``texts`` texts."""
    dense = of_texts(layer_ops(config, rows, slots), texts)
    if not isinstance(config, MixtureConfig):
        return _times(config.layers, dense)
    plain = len(config.dense_layers)
    # More rows touch more experts.
    mixture = [*of_texts(attention_ops(config, rows, slots), texts), *mixture_ops(config, texts * rows)]
    return [*_times(plain, dense), *_times(config.layers - plain, mixture)]


def _times(layers: int, ops: list[Op]) -> list[Op]:
    return [replace(op, count=op.count * layers) for op in ops if layers]


def _linear(config: TeacherConfig, layer: str, rows: int, inner: int, outer: int, rounded: bool = False) -> list[Op]:
    """A linear layer of the blocks in the type of its weights; all blocks count as the first one."""
    name, first = layer.replace("_", " "), f"layers.0.{layer}"
    packed = next((layer for layer in config.packed if layer.name == first), None)
    if packed is not None and packed.group:
        return [int4_product(name, rows, inner, outer, packed)]
    return products(name, rows, inner, outer, first in config.quantised, rounded)


def int8_draft(config: TeacherConfig, int8: bool) -> TeacherConfig:
    """The sizes of a drafter's blocks as its cost reads them. ``int8`` says for the drafter's layers what ``quantised``
    says for the teacher's."""
    layers = ("qkv", "o", "gate_up", "down")
    return replace(config, quantised=(*(f"layers.0.{layer}" for layer in layers), HEAD) if int8 else (), packed=())


def step_ops(config: TeacherConfig, rows: int, slots: int, head_rows: int | None = None, texts: int = 1) -> list[Op]:
    """A whole teacher step: commit and verify of `rows` rows of each of `texts` texts, logits of `head_rows` of them
    (all if None)."""
    H, V = config.hidden, config.vocabulary
    scored = rows if head_rows is None else head_rows
    branch = config.layers * 2 * config.kv_heads * config.head_dim
    rotated = (config.heads + 2 * config.kv_heads) * config.head_dim
    before = [
        copy("embedding and rotary rows", rows * (H + 2 * config.head_dim) / 3, count=3),
        copy("cache rows and mask", rows * slots / 3, count=_PLACE_OPS, width=1),
        # The first norm adds nothing and rounds nothing.
        *([rows_of("qkv", rows, H)] if "layers.0.qkv" in config.quantised else []),
        copy("branch", branch * (rows + MOVED_ROWS.value) / 4, count=4),
        *([copy("rotary rows", rows * rotated, count=2)] if turns_whole(config) else []),
    ]
    after = [
        elementwise("last norm", scored * H, 4),
        *products("head", scored, H, V, HEAD in config.quantised),
        elementwise("argmax", scored * V, 1),
    ]
    return [*of_texts(before, texts), *all_layers(config, rows, slots, texts), *of_texts(after, texts)]


def step_s(device: DeviceSpec, config: TeacherConfig, rows: int, slots: int, ranks: int = 1) -> float:
    """Seconds of a teacher step of `rows` rows at KV length `slots` in a static graph, on `ranks` devices together."""
    return math.fsum(parts(device, on_ranks(step_ops(config, rows, slots), config, ranks)).values())


def graph_bytes(config: TeacherConfig, rows: int, slots: int) -> int:
    """Activations and results that one more graph needs; weights and caches are shared. A lower bound."""
    inner = config.intermediate * 3
    if isinstance(config, MixtureConfig):
        inner = max(inner, config.experts_per_token * (config.hidden * 2 + config.expert_intermediate * 3))
    widest = config.hidden * 2 + inner + config.vocabulary
    branch = config.layers * 2 * config.kv_heads * config.head_dim
    return rows * (BYTES * (widest + branch) + slots)
