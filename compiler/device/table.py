"""How long a step takes on an Ascend device that is not here: an analytic model, every constant with its source.

A step is a list of operators. Each takes a fixed cost, and the longest of four times: memory traffic, matrix work,
vector work, and the exchange between the two kinds of core. Operators run one after the other, as in one stream of a
static graph. The host launches the graph as a whole, so operators cost no launch. The result is a latency table in the
format of measured ones, marked as modelled.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from draftwood.compiler.device.constants import COMMON, INPUT_SECONDS, LINKS, OUTPUT_SECONDS
from draftwood.compiler.device.devices import DeviceSpec, parts
from draftwood.compiler.device.experts import touched_experts
from draftwood.compiler.device.operators import TILING, Op, of_texts
from draftwood.compiler.device.ranks import on_ranks
from draftwood.compiler.device.steps import graph_bytes, int8_draft, step_ops
from draftwood.compiler.teachers.config import TeacherConfig
from draftwood.compiler.teachers.experts import MixtureConfig
from draftwood.trees.latency import EntryKind, LatencyEntry, LatencyTable


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCost(ABC):
    """The cost of a drafter: the operators of a draft for every (depth, width) it can be asked for. Its fields are the
    drafter's sizes."""

    # The name of its kind.
    kind: ClassVar[str]

    @property
    def facts(self) -> dict[str, Any]:
        """Its facts in a table."""
        sizes = {name: list(size) if isinstance(size, tuple) else size for name, size in asdict(self).items()}
        return {"kind": self.kind, **sizes}

    @classmethod
    @abstractmethod
    def of_sizes(cls, sizes: Sequence[str], teacher: TeacherConfig) -> DraftCost | None:
        """The cost of a drafter of such sizes, which ``Kind.cost_sizes`` describes; None if they make no sense."""

    @classmethod
    @abstractmethod
    def of_config(cls, config: Any) -> DraftCost:
        """The cost of a drafter by the sizes that a manifest has of it."""

    @abstractmethod
    def drafts(self, config: TeacherConfig, slots: int) -> Iterator[tuple[int, int, list[Op]]]:
        """(depth, width, operators of the whole draft); `slots` is the length of its own cache.

        ``config`` has the sizes of its blocks; its quantised layers are the drafter's (`int8_draft`).
        """

    def block(self, config: TeacherConfig) -> TeacherConfig:
        """The sizes of its blocks: those of ``config``, the teacher's or a folder's, but for those that it names."""
        return config


def whole_sizes(sizes: Sequence[str], usual: Sequence[int], required: int = 1) -> tuple[int, ...] | None:
    """Sizes as numbers; ``usual`` are the defaults of all after the ``required``; None if one is no number above 0."""
    numbers = [int(size) for size in sizes if size.isdecimal() and int(size)]
    if len(numbers) != len(sizes) or not required <= len(numbers) <= required + len(usual):
        return None
    return (*numbers, *usual[len(numbers) - required :])


def modelled_table(
    device: DeviceSpec,
    config: TeacherConfig,
    rows: Sequence[int],
    slots: Sequence[int],
    drafter: DraftCost | None = None,
    teacher: Mapping[str, Any] | None = None,
    prefill: Sequence[int] = (),
    ranks: int = 1,
    int8_drafter: bool = False,
    texts: Sequence[int] = (1,),
    block: TeacherConfig | None = None,
) -> LatencyTable:
    """The table of a device: a step of every number of texts and rows at every KV length, prefill chunks, drafts, host.

    A shape that does not fit a KV length, its rows and the spare slot, is left out. With ``ranks`` that many devices
    run every step together. ``int8_drafter``: the drafter's linear layers are W8A8, whatever the teacher's are.
    ``block`` has the sizes of the drafter's blocks, by default the teacher's.
    """
    mixture = config if isinstance(config, MixtureConfig) else None

    def spent_on(ops: Iterable[Op], sizes: TeacherConfig = config) -> dict[str, float]:
        return parts(device, on_ranks(ops, sizes, ranks))

    entries: list[LatencyEntry] = []
    for together, length in itertools.product(texts, slots):
        for count in sorted({count for count in rows if count < length}):
            spent = spent_on(step_ops(config, count, length, texts=together))
            kind: EntryKind = "decode" if count == 1 else "verify"
            cache_bytes = together * graph_bytes(config, count, length)
            entries.append(_entry(kind, spent, (count, length), cache_bytes, together))
    for count, length in ((count, length) for length in slots for count in prefill if count < length):
        entries.append(_entry("prefill", spent_on(step_ops(config, count, length, 1)), (count, length)))
    block = int8_draft(drafter.block(block or config) if drafter else config, int8_drafter)
    drafts = list(drafter.drafts(block, max(slots))) if drafter else []
    for together in texts:
        for depth, width, ops in drafts:
            entries.append(_entry("draft", spent_on(of_texts(ops, together), block), (depth, width), texts=together))
        entries.append(_entry("host", {"inputs": INPUT_SECONDS.value, "results": OUTPUT_SECONDS.value}, texts=together))
    return LatencyTable(
        source="modelled",
        kv_read="static",
        entries=tuple(entries),
        machine={
            "device": device.name,
            "soc": device.soc,
            "dtype": "bfloat16",
            "memory_bytes": device.memory,
            **({"ranks": ranks} if ranks > 1 else {}),
        },
        teacher=dict(teacher or {}) | _mixture_facts(mixture),
        drafter=(drafter.facts | ({"int8": True} if int8_drafter else {})) if drafter else {},
        notes=(*NOTES, *([TEXTS_NOTE] if max(texts) > 1 else []), *([_load_note(mixture, rows)] if mixture else [])),
        constants=(*device.constants(ranks), *COMMON, *(LINKS if ranks > 1 else ())),
    )


NOTES = (
    "Modelled, not measured: no figure of this table was taken on a device.",
    f"Attention tiles, and with them the step from 16 to 17 rows, follow {TILING}.",
    "A step attends over all slots of its KV length; the operators are those of this project's decoder in bf16.",
    "The accepted rows are committed inside the step, so there is no commit entry.",
    "bytes counts a graph's own activations and results; what the runtime adds to a graph is not known.",
)


TEXTS_NOTE = (
    "The rows of all texts of a launch pass the weights once, a drafter's too; each text's keys and values are read for"
    " it alone, and the host's share is taken to be that of one text."
)


def _mixture_facts(config: MixtureConfig | None) -> dict[str, Any]:
    return {"experts": {"experts": config.experts, "per_token": config.experts_per_token}} if config else {}


def _load_note(config: MixtureConfig, rows: Sequence[int]) -> str:
    """How many experts a step of some rows touches, and how that is known."""
    counts = [count for count in (1, 2, 4, 8, 16, 32, 64) if count in rows] or sorted(rows)[:1]
    touched = ", ".join(f"{touched_experts(config, count):.0f} at {count}" for count in counts)
    return (
        f"Experts of a layer that a step touches, of {config.experts}, by its rows: {touched};"
        " taken to be chosen evenly by every row."
    )


def _entry(
    kind: EntryKind,
    spent: dict[str, float],
    shape: tuple[int, int] = (0, 0),
    bytes: int = 0,
    texts: int = 1,
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
        texts=texts,
    )
