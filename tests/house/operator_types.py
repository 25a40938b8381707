"""Distils which element types CANN's kernels take, operator by operator, from public copies of its own lists.

    python -m draftwood.tests.house.operator_types --repositories FOLDER --out compiler/ge/element_types.json

``FOLDER`` holds a bare or plain clone of each repository of `SOURCES`, named OWNER+NAME. Two sources are read, with git
alone. One is the operator store of CANN 8.1.RC1: the types of its TBE and Ascend C kernels and of its AI CPU. The other
is the open definitions of 8.5.0, 9.0.0 and 9.1.0 (``*_def.cpp``). Where a function of the store makes the list, it was
read by hand: `BY_HAND`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from draftwood.compiler.ge.element_types import CODES, ElementTypes, OperatorTypes, SourceRepository, encode
from draftwood.compiler.ge.operators.table import OPERATORS

CHIPS = ("ascend910b", "ascend910_93")
STORE = "8.1.RC1"
_STORE = ("leideng/CANN-8.1.RC1", "HEAD", "Ascend/ascend-toolkit/8.1.RC1/opp/built-in/op_impl")
_OPEN = ("hicann/ops-math", "hicann/ops-nn", "cannmirror/ops-transformer")
_RELEASES = ("8.5.0", "9.0.0", "9.1.0")
SOURCES = ((STORE, *_STORE), *((release, name, release, "") for release in _RELEASES for name in _OPEN))

_CODE = {name: code for code, names in CODES.items() for name in names}
Row = tuple[str, ...]
# Operand -> the types that are listed for it, one for each row; None if any is taken.
Columns = dict[str, list[str]]


def _same(names: str, types: str, **fixed: str) -> list[Row]:
    """A row for each type, alike for all operands but the fixed ones."""
    return [tuple(fixed.get(name, kind) for name in names.split()) for kind in types.split()]


_MIXED: list[Row] = [("f2", "f4", "f4"), ("f4", "f2", "f4"), ("b2", "f4", "f4"), ("f4", "b2", "f4")]
_JOINED = "f4 f2 i1 i4 i8 u1 u8 b1 b2"
_PRODUCT: list[Row] = [
    ("b2", "b2", "f4", "b2"),
    ("f2", "f2", "f4", "f2"),
    ("f2", "f2", "f2", "f2"),
    ("f2", "f2", "f4", "f4"),
]
_PRODUCT += [("f4", "f4", "f4", "f4"), ("i4", "i4", "i4", "i4")]
_TBE = "ai_core/tbe/impl/dynamic"
# Operator -> file of the store whose function lists the types, operands and results in order, rows.
BY_HAND: Mapping[str, tuple[str, str, int, list[Row]]] = {
    "Add": (f"{_TBE}/add.py", "x1 x2 y", 2, _same("x1 x2 y", "f2 i4 f4 u1 i1 b2 i8 b1") + _MIXED),
    "Mul": (f"{_TBE}/mul.py", "x1 x2 y", 2, _same("x1 x2 y", "f2 i4 f4 u1 i1 b2 i8 b1") + _MIXED),
    "RealDiv": (f"{_TBE}/real_div.py", "x1 x2 y", 2, [*_same("x1 x2 y", "f2 f4 i4 b2"), ("b1", "b1", "f4")]),
    "Addcmul": (f"{_TBE}/addcmul.py", "input_data x1 x2 value y", 4, _same("input_data x1 x2 value y", "f2 f4 i4 b2")),
    "Axpy": (f"{_TBE}/axpy.py", "x1 x2 y", 2, _same("x1 x2 y", "f2 f4 i4 b2")),
    **dict.fromkeys(("ConcatD", "ConcatV2D"), (f"{_TBE}/concat_d.py", "x y", 1, _same("x y", _JOINED))),
    "Pack": (f"{_TBE}/pack.py", "x y", 1, _same("x y", _JOINED)),
    "Unpack": (f"{_TBE}/unpack.py", "x y", 1, _same("x y", "f2 f4 i4 i1 i8 u1 u8 b2")),
    "PadV3": (
        f"{_TBE}/pad_v3.py",
        "x paddings constant_values y",
        3,
        [row for k in ("i4", "i8") for row in _same("x paddings constant_values y", "i1 f2 b2 f4 i4", paddings=k)],
    ),
    "SoftmaxV2": (f"{_TBE}/softmax_v2.py", "x y", 1, [*_same("x y", "b2 f2 f4"), ("f2", "f4")]),
    "Sort": (f"{_TBE}/sort.py", "x y1 y2", 1, _same("x y1 y2", "f2 f4 b2", y2="i4")),
    **dict.fromkeys(
        ("MatMul", "MatMulV2", "BatchMatMul", "BatchMatMulV2"),
        ("ai_core/tbe/impl/util/util_gemm.py", "x1 x2 bias y", 3, _PRODUCT),
    ),
}
# Names of the definitions that differ from the graphs'. GE puts the third versions instead of products.
_DEFINED = {"MatMul": "MatMulV3", "MatMulV2": "MatMulV3", "BatchMatMul": "BatchMatMulV3"}
# HCCL's own sums and copies, no kernels of a store.
_HCCL = "HcomAllReduce HcomAllGather"
_HCCL_SOURCE = "CANN 8.5.0, API reference of HcclAllReduce and HcclAllGather, rows of A2 and A3"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repositories", type=Path, required=True, metavar="FOLDER", help="clones, as OWNER+NAME")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the table, as JSON")
    args = parser.parse_args()
    args.out.write_bytes(encode(distilled(args.repositories)))


def distilled(folder: Path) -> ElementTypes:
    """The table of every operator that the graphs may hold."""
    clones = {name: _Clone.of(folder, name) for _, name, _, _ in SOURCES}
    store = _Store(clones[_STORE[0]])
    opened = {release: _Definitions([clones[name] for name in _OPEN], release) for release in _RELEASES}
    operators = {}
    for name in sorted(OPERATORS):
        if found := _operator(name, store, opened):
            operators[name] = found
    for name in _HCCL.split():
        rows = {"hccl": _texts(_same("x y", "f4 f2 b2 i1 i4 i8"))}
        operators[name] = OperatorTypes(operands=("x",), results=("y",), rows=rows, cpu=None, read=_HCCL_SOURCE)
    listed = tuple(
        SourceRepository(release=release, repository=name, commit=clones[name].commit(branch))
        for release, name, branch, _ in SOURCES
    )
    return ElementTypes(chips=CHIPS, sources=listed, operators=operators)


def _operator(name: str, store: _Store, opened: Mapping[str, _Definitions]) -> OperatorTypes | None:
    """Rows by release, over the operands that the graphs give it; None if no source knows the operator."""
    rows, read = {}, ""
    operands: tuple[str, ...] = tuple(given.rstrip("_") for given in OPERATORS[name].operands)
    results: tuple[str, ...] = ()
    found: dict[str, tuple[Columns, int]] = {}
    if name in BY_HAND:
        path, names, count, listed = BY_HAND[name]
        store.clone.show("HEAD", f"{_STORE[2]}/{path}")
        read = path
        found[STORE] = dict(zip(names.split(), map(list, zip(*listed, strict=True)), strict=True)), count
    elif (core := store.core(name)) is not None:
        found[STORE] = core
    for release, definitions in opened.items():
        if (core := definitions.core(_DEFINED.get(name, name))) is not None:
            found[release] = core
    for release, (columns, count) in found.items():
        every = list(columns)
        results = tuple(one.rstrip("'") for one in every[count:])
        rows[release] = _texts(_rows(columns, [*_chosen(name, every[:count], operands), *every[count:]]))
    cpu = store.cpu(name, operands)
    if not rows and cpu is None:
        return None
    return OperatorTypes(operands=operands, results=results, rows=_joined(rows), cpu=cpu, read=read)


def _chosen(name: str, inputs: list[str], operands: Sequence[str]) -> list[str]:
    """Names in the source of the operands that graphs give: the same, or those of the same places."""
    if set(operands) <= set(inputs):
        return list(operands)
    assert len(inputs) >= len(operands), f"{name}: {inputs} in the source, {operands} in graphs"
    return inputs[: len(operands)]


def _rows(columns: Columns, names: Sequence[str]) -> list[Row]:
    """The rows over these operands, in types that graphs use, each once."""
    places = [columns[name] for name in names]
    length = max(map(len, places))
    full = [place * length if len(place) == 1 else place for place in places]
    assert {len(place) for place in full} == {length}, names
    return [row for row in zip(*full, strict=True) if all(row) and row[0] != "-"]


def _texts(rows: Sequence[Row]) -> tuple[str, ...]:
    return tuple(sorted({" ".join(row) for row in rows}))


def _joined(rows: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Releases that list the same stand together."""
    names: dict[tuple[str, ...], list[str]] = {}
    for release, texts in rows.items():
        names.setdefault(texts, []).append(release)
    return {" ".join(releases): texts for texts, releases in names.items()}


def _codes(types: str | Sequence[str]) -> list[str]:
    """A code for each type; "-" for one that no graph uses."""
    given = types.split(",") if isinstance(types, str) else types
    return [_CODE.get(kind.strip().lower().removeprefix("ge::").removeprefix("dt_"), "-") for kind in given]


class _Clone:
    """A repository on disk; nothing of it is executed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def of(cls, folder: Path, name: str) -> _Clone:
        found = folder / name.replace("/", "+")
        return cls(found / "repo" if (found / "repo").is_dir() else found)

    def commit(self, branch: str) -> str:
        return self._git("rev-parse", branch).strip()

    def show(self, branch: str, path: str) -> str:
        return self._git("show", f"{branch}:{path}")

    def files(self, branch: str) -> list[str]:
        return self._git("ls-tree", "-r", "--name-only", branch).splitlines()

    def _git(self, *arguments: str) -> str:
        command = ["git", "-C", str(self.folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


class _Store:
    """The operator store of CANN 8.1.RC1: one JSON file a chip, and those of the AI CPU."""

    def __init__(self, clone: _Clone) -> None:
        self.clone = clone
        one, other = (self._read(f"ai_core/tbe/config/{chip}/aic-{chip}-ops-info.json") for chip in CHIPS)
        self._core = {name: entry for name, entry in one.items() if name in other}
        differing = [name for name in OPERATORS if name in self._core and self._core[name] != other[name]]
        assert not differing, f"{differing} are not alike on {' and '.join(CHIPS)}; the table needs a column a chip"
        folder = "aicpu/{0}/config/{0}.json"
        self._cpu = self._read(folder.format("tf_kernel")) | self._read(folder.format("aicpu_kernel"))

    def _read(self, path: str) -> Any:
        return json.loads(self.clone.show("HEAD", f"{_STORE[2]}/{path}"))

    def core(self, name: str) -> tuple[Columns, int] | None:
        """Columns of operands and results, and how many are operands."""
        entry = self._core.get(name, {})
        inputs, outputs = (_numbered(entry, side) for side in ("input", "output"))
        if not inputs or any("dtype" not in one for one in inputs):
            return None
        # Rows of other layouts than ND are not for us.
        flat = [all(_flat(one, i) for one in inputs) for i in range(len(inputs[0]["dtype"].split(",")))]
        columns = {}
        for one in [*inputs, *(o | {"name": f"{o['name']}'"} for o in outputs)]:
            columns[one["name"]] = [code if keep else "" for code, keep in zip(_codes(one["dtype"]), flat, strict=True)]
        return columns, len(inputs)

    def cpu(self, name: str, operands: Sequence[str]) -> tuple[str, ...] | None:
        """The types of each operand, as the AI CPU lists them; "*" if it lists none."""
        entry = self._cpu.get(name)
        if entry is None:
            return None
        listed = [one.get("type", "") for one in _numbered(entry, "input")]
        texts = [" ".join(sorted(set(_codes(types)) - {"-"})) for types in listed]
        return tuple(itertools.islice(itertools.chain(texts, itertools.repeat("*")), len(operands)))


def _numbered(entry: Mapping[str, Any], side: str) -> list[dict[str, Any]]:
    numbers = sorted(int(key.removeprefix(side)) for key in entry if re.fullmatch(rf"{side}\d+", key))
    return [entry[f"{side}{number}"] for number in numbers]


def _flat(entry: Mapping[str, Any], number: int) -> bool:
    layouts = (entry.get("format") or entry.get("unknownshape_format") or "ND").split(",")
    return len(layouts) <= number or not layouts[number].startswith(("FRACTAL", "NC1", "NDC1", "C1"))


_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_LIST = re.compile(r"(?:std::vector|std::initializer_list)<ge::(DataType|Format)>\s*(\w+)\s*=?\s*\{([^}]*)\}")
_OPERAND = re.compile(r"(\w+)\s*(?:->|\.)\s*(Input|Output)\(\s*\"(\w+)\"\s*\)(.*)", re.DOTALL)
_CHOSEN = re.compile(r"\.(DataType|DataTypeList|Format|FormatList|Follow)\(\s*(?:\{([^}]*)\}|\{?\"?(\w+)\"?\}?)")
_ADDED = re.compile(r"AddConfig\(\s*\"(\w+)\"\s*(?:,\s*(\w+)\s*)?\)")


class _Definitions:
    """The open operator definitions of one release: C++ that is read, not compiled."""

    def __init__(self, clones: Sequence[_Clone], release: str) -> None:
        self._release = release
        self._places = {}
        for clone in clones:
            for path in clone.files(release):
                if path.endswith("_def.cpp") and not path.startswith("experimental/"):
                    self._places[Path(path).name.removesuffix("_def.cpp").replace("_", "")] = clone, path

    def core(self, name: str) -> tuple[Columns, int] | None:
        """As `_Store.core`; None if the operator is not defined there for the chips of the table."""
        place = self._places.get(name.lower())
        if place is None:
            return None
        text = _COMMENT.sub("", place[0].show(self._release, place[1]))
        lists = {match[2]: match[3] for match in _LIST.finditer(text)}
        found = dict(_configured(text, lists))
        one, other = (found.get(chip) for chip in CHIPS)
        assert one == other or one is None or other is None, f"{name} is not alike on {' and '.join(CHIPS)}"
        return one


def _configured(text: str, lists: Mapping[str, str]) -> Iterator[tuple[str, tuple[Columns, int]]]:
    """(chip, columns) of every chip that a definition adds; a configuration overrides operands of the definition."""
    own: dict[str, dict[str, Columns]] = {"this": {}}
    order: list[str] = []
    for statement in text.split(";"):
        if match := _OPERAND.search(statement):
            owner, side, name, rest = match.groups()
            key = name if side == "Input" else f"{name}'"
            own.setdefault(owner, {})[key] = _listed(rest, lists)
            if owner == "this":
                order.append(key)
        elif match := _ADDED.search(statement):
            operands = own["this"] | own.get(match[2] or "", {})
            yield match[1], _columns({key: operands[key] for key in order})


def _listed(text: str, lists: Mapping[str, str]) -> Columns:
    """The definition of one operand: types, layouts, or the operand that it follows; lists by name or inline."""
    found = {}
    for match in _CHOSEN.finditer(text):
        said = match[2] if match[2] is not None else lists.get(match[3], match[3])
        found[match[1]] = [one for one in re.split(r"[\s,]+", said) if one]
    return found


def _columns(operands: Mapping[str, Columns]) -> tuple[Columns, int]:
    """Rows of the definition, operands first; a list of its own multiplies them, and one operand may follow another."""
    inputs = [key for key in operands if not key.endswith("'")]
    names = [*inputs, *(key for key in operands if key.endswith("'"))]
    length = max((len(one.get("DataType", ())) for one in operands.values()), default=0)
    free = [name for name in names if "DataTypeList" in operands[name]]
    choices = list(itertools.product(*(operands[name]["DataTypeList"] for name in free)))
    columns: Columns = {name: [] for name in names}
    for i, choice in itertools.product(range(max(length, 1)), choices):
        chosen = dict(zip(free, choice, strict=True))
        flat = not any("NZ" in _row(one.get("Format", [""]), i) for one in operands.values())
        for name in names:
            kind = chosen.get(name) or _at(operands, name, i, chosen)
            columns[name].append(_codes([kind])[0] if flat else "")
    return columns, len(inputs)


def _at(operands: Mapping[str, Columns], name: str, i: int, chosen: Mapping[str, str]) -> str:
    one = operands[name]
    if "Follow" in one:
        return chosen.get(one["Follow"][0]) or _at(operands, one["Follow"][0], i, chosen)
    return _row(one["DataType"], i)


def _row(listed: Sequence[str], i: int) -> str:
    """One of a list, whose last stands for all that follow."""
    return listed[min(i, len(listed) - 1)]


if __name__ == "__main__":
    main()
