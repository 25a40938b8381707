"""Which element types CANN's kernels take on a 910B and 910C, and on which engine, by release.

The table is distilled by ``draftwood.tests.house.operator_types`` from the public operator store of CANN 8.1.RC1 and
the open operator definitions of later releases. It names their commits. GE matches a node as its open source says
(compiler/engines/nn_engine: sub_ops_store.cc and op_dtype_rise_matcher.cc, 9.1.0). Each operand and result has its type
in one row, or float32 instead of a half type, for which GE adds a Cast.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Literal

import msgspec
import torch

# Code of a type in the table -> its names in the sources.
CODES: Mapping[str, tuple[str, ...]] = {
    "f4": ("float32", "float"),
    "f2": ("float16",),
    "b2": ("bfloat16", "bf16"),
    "i1": ("int8",),
    "u1": ("uint8",),
    "i4": ("int32",),
    "i8": ("int64",),
    "u8": ("uint64",),
    "b1": ("bool",),
}
_CODE = {getattr(torch, names[0]): code for code, names in CODES.items()}
_HALVES = ("f2", "b2")
# Releases that run the graphs at all (`draftwood.versions`); the store's rows hold if none of them lists any.
_RUN = ("8.5.0", "9.0.0", "9.1.0")


class SourceRepository(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A repository, and the part of it that was read."""

    release: str
    repository: str
    commit: str


class OperatorTypes(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Rows of the AI Core by release, a code for each operand and result; what the AI CPU lists, operand by operand.

    ``operands`` are those that graphs give, in the operator's order. ``cpu`` is None if the AI CPU does not know the
    operator, and "*" if it lists no types. ``read`` names the file that was read by hand, "" if none was.
    """

    operands: tuple[str, ...]
    results: tuple[str, ...]
    rows: dict[str, tuple[str, ...]]
    cpu: tuple[str, ...] | None
    read: str = ""


class ElementTypes(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The whole table."""

    chips: tuple[str, ...]
    sources: tuple[SourceRepository, ...]
    operators: dict[str, OperatorTypes]


@dataclass(frozen=True, slots=True)
class Placed:
    """Where a node runs; ``raised`` are the operands and results around which GE adds a Cast to float32.

    ``nearest`` is the row that comes nearest, if neither engine takes the node.
    """

    engine: Literal["AI Core", "AI CPU", "none"]
    raised: tuple[str, ...] = ()
    nearest: str = ""


def encode(table: ElementTypes) -> bytes:
    """The bytes of the table's file, an operator a line; equal tables are equal bytes."""
    lines = [f'  "{name}": {msgspec.json.encode(types).decode()}' for name, types in table.operators.items()]
    chips, sources = (msgspec.json.encode(part).decode() for part in (table.chips, table.sources))
    sources = sources.replace("},{", "},\n  {")
    text = f'{{\n "chips": {chips},\n "sources": {sources},\n "operators": {{\n' + ",\n".join(lines) + "\n }\n}\n"
    return text.encode()


@cache
def element_types() -> ElementTypes:
    """The table next to this module."""
    return msgspec.json.decode(files(__package__).joinpath("element_types.json").read_bytes(), type=ElementTypes)


def place(kind: str, types: Mapping[str, torch.dtype], results: Sequence[torch.dtype]) -> Placed | None:
    """Where a node runs by the types of its operands, by name, and of its results; None: not in the table."""
    known = element_types().operators.get(kind)
    if known is None:
        return None
    operands = [(_operand(known, name), _CODE[dtype]) for name, dtype in types.items()]
    if not {name for name, _ in operands} <= {*known.operands}:
        return Placed("none")  # no graph of ours gives it that
    names = [*(name for name, _ in operands), *known.results]
    codes = [*(code for _, code in operands), *(_CODE[dtype] for dtype in results[: len(known.results)])]
    columns = [*(known.operands.index(name) for name, _ in operands)]
    columns += range(len(known.operands), len(known.operands) + len(known.results))
    ports = list(zip(names, columns, codes, strict=False))
    placed = [_placed(texts, ports) for texts in _listings(known)]
    if placed and all(option.engine == "AI Core" for option in placed):
        return max(placed, key=lambda option: len(option.raised))
    if known.cpu is not None and all(
        known.cpu[known.operands.index(name)] in ("*", "") or code in known.cpu[known.operands.index(name)].split()
        for name, code in operands
    ):
        return Placed("AI CPU")
    return next((option for option in placed if option.engine == "none"), Placed("none"))


def _operand(known: OperatorTypes, name: str) -> str:
    """The operand of the table; those of a dynamic one are numbered."""
    return name if name in known.operands else name.rstrip("0123456789")


def _listings(known: OperatorTypes) -> list[tuple[str, ...]]:
    """The rows of every release that runs the graphs: its own, or those of the store (or HCCL) if it lists none."""
    by_release = {release: texts for releases, texts in known.rows.items() for release in releases.split()}
    first = next(iter(known.rows.values()), ())
    return list(dict.fromkeys(by_release.get(release, first) for release in _RUN if first))


def _placed(texts: Sequence[str], ports: Sequence[tuple[str, int, str]]) -> Placed:
    """The row that takes a node with the fewest raised types."""
    best, nearest, most = None, "", -1
    for text in texts:
        row = text.split()
        apart = [(name, code, row[column]) for name, column, code in ports if row[column] != code]
        if all(code in _HALVES and listed == "f4" for _, code, listed in apart):
            raised = tuple(name for name, _, _ in apart)
            best = raised if best is None or len(raised) < len(best) else best
        if len(ports) - len(apart) > most:
            most, nearest = len(ports) - len(apart), text
    return Placed("none", nearest=nearest) if best is None else Placed("AI Core", best)


__all__ = ["CODES", "ElementTypes", "OperatorTypes", "Placed", "SourceRepository", "element_types", "encode", "place"]
