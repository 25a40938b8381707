"""A build's request, and the checks on it that need no file."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from msgspec.structs import replace

from draftwood.compiler.targets.registry import TARGETS
from draftwood.compiler.targets.steps import Shapes
from draftwood.compiler.targets.storage import Storage
from draftwood.compiler.targets.target import WeightMode
from draftwood.compiler.teachers.conversion import Precision
from draftwood.compiler.teachers.formats import has_tokenizer
from draftwood.errors import RequestError, TreeError
from draftwood.files import read_text
from draftwood.manifest import MOST_CORPUS_BYTES, MOST_TEXTS
from draftwood.planned import Gear, Planning, named_gears
from draftwood.trees import Topology
from draftwood.trees.spec import Budget, Lookup

# A prompt takes the cheapest of them (`draftwood.runtime.engines.chunks`). A KV length has those below it.
PREFILL_ROWS = (32, 128, 512)
# A cache is a multiple of this many slots: fused kernels tile the KV axis in blocks of 128.
SLOT_MULTIPLE = 128
# Of a tree: it becomes part of file names.
_NAME = re.compile("[A-Za-z0-9_][A-Za-z0-9._-]*")
# Devices of one machine at most: beyond it links are another kind.
MOST_RANKS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildRequest:
    """A build's request. ``trees`` are named, the plain tree first; ``slots`` are KV lengths C, ascending."""

    model: Path
    drafter: Path | None
    trees: tuple[tuple[str, Topology | Budget], ...]
    slots: tuple[int, ...]
    # Rows of the static graphs for prompts; none if only the CPU's graph with run-time sizes will read prompts.
    prefill_rows: tuple[int, ...] = PREFILL_ROWS
    targets: tuple[str, ...] = ("onnx",)
    # Precisions by target; a target that is not named takes the one that suits it and the teacher.
    precisions: Mapping[str, Storage] = field(default_factory=dict)
    weights: WeightMode = "copy"
    # The number of devices over which a target's graphs are split.
    ranks: int = 1
    # Gears to build; every tree at every length if there are none.
    gears: tuple[Gear, ...] = ()
    # The form that a packed teacher's linear layers are kept in.
    precision: Precision = "exact"
    # The drafter's linear layers in W8A8, for any form of the teacher's: no text changes.
    int8_drafter: bool = False
    # Also the step with the same bits in every tree; on a CPU.
    bitwise: bool = False
    # Also a whole step of every gear as one graph; on an NPU.
    whole: bool = False
    # Texts that one launch takes at most, on a CPU.
    texts: int = 1
    # A text file for lookup trees, in addition to the text being decoded.
    corpus: Path | None = None
    # The policy's part of the plan that the trees come from, without step times of other gears.
    plan: Planning | None = None

    @property
    def shapes(self) -> Shapes:
        """The shapes that steps are made for."""
        gears = self.gears or named_gears((name, slots) for name, _ in self.trees for slots in self.slots)
        return Shapes(self.trees, self.slots, self.prefill_rows, gears, self.bitwise, self.whole, self.texts)

    @property
    def planning(self) -> Planning | None:
        """The plan's data of the gears that are built."""
        if self.plan is None:
            return None
        built = {gear.name for gear in self.shapes.gears}
        return replace(self.plan, times=tuple(time for time in self.plan.times if time.gear in built))


def check_request(request: BuildRequest, out: Path) -> None:
    """Raises RequestError or TreeError if the request cannot be served by any checkpoint."""
    if os.path.lexists(out):
        raise RequestError(f"{out}: exists already; expected a new folder; remove it or choose another --out")
    _check_kinds(request)
    _check_names(request)
    _check_targets(request)
    _check_int8(request)
    _check_precision(request)
    _check_corpus(request)
    if not 1 <= request.ranks <= MOST_RANKS:
        raise RequestError(f"--ranks {request.ranks}: expected 1 to {MOST_RANKS} devices")
    texts = max((request.texts, *request.shapes.batches))
    if not 1 <= min(request.texts, texts) <= texts <= MOST_TEXTS:
        raise RequestError(f"{texts} texts of a launch: expected 1 to {MOST_TEXTS}")
    if texts > 1 and request.ranks > 1:
        raise RequestError(
            f"{texts} texts of a launch: {request.ranks} ranks take one text a launch; leave --ranks out, or plan for 1"
        )
    if request.ranks > 1 and not any(TARGETS[name].splits for name in request.targets):
        able = " or ".join(target.name for target in TARGETS.values() if target.splits)
        raise RequestError(f"--ranks {request.ranks}: splits the graphs of an NPU; give --target {able} as well")
    check_slots(request.slots)
    if request.prefill_rows and not 1 <= min(request.prefill_rows) < max(request.slots):
        raise RequestError(
            f"prefill_rows {min(request.prefill_rows)}: expected chunks of 1 token or more, below KV length"
            f" {max(request.slots)}"
        )
    trees = dict(request.trees)
    for gear in request.shapes.gears:
        tree = trees[gear.tree]
        if tree.rows + tree.depth + 1 >= gear.slots:
            raise TreeError(f"tree {gear.tree}: {tree.rows} rows do not fit KV length {gear.slots}; raise --kv")


def check_slots(slots: Sequence[int], positions: int = sys.maxsize) -> None:
    """RequestError if a teacher of so many positions cannot have one of these KV lengths."""
    for length in slots:
        if length <= 0 or length % SLOT_MULTIPLE:
            raise RequestError(f"--kv {length}: expected a positive multiple of {SLOT_MULTIPLE} cache slots")
    if (longest := max(slots)) > positions:
        raise RequestError(
            f"--kv {longest}: the teacher knows {positions} positions; choose at most"
            f" {positions // SLOT_MULTIPLE * SLOT_MULTIPLE}"
        )


def _check_kinds(request: BuildRequest) -> None:
    """Refuses, before anything is made of them, values that a program has given and that are of other types."""
    if not isinstance(request, BuildRequest):
        raise RequestError(f"request: expected a BuildRequest, got {type(request).__name__}")
    for name, kind in get_type_hints(BuildRequest).items():
        if not _fits(value := getattr(request, name), kind):
            expected = getattr(kind, "__name__", kind) if isinstance(kind, type) else kind
            raise RequestError(f"{name}: expected {expected}, got {value!r:.100}")


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value is of an annotation's type; values of a ``Literal`` have their own check."""
    origin, kinds = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return any(_fits(value, one) for one in kinds)
    if origin is Literal:
        return isinstance(value, str)
    if origin is Mapping:
        return isinstance(value, Mapping) and all(all(map(_fits, item, kinds)) for item in value.items())
    if origin is tuple:
        kinds = kinds[:1] * len(value) if kinds[1:] == (...,) and isinstance(value, tuple) else kinds
        return isinstance(value, tuple) and len(value) == len(kinds) and all(map(_fits, value, kinds))
    return isinstance(value, kind) and (kind is not int or not isinstance(value, bool))


def _check_names(request: BuildRequest) -> None:
    """Refuses lengths and trees that cannot be told apart by what files and gears are named after."""
    for field_name in ("slots", "prefill_rows"):
        sizes = getattr(request, field_name)
        if list(sizes) != sorted(set(sizes)):
            raise RequestError(f"{field_name} {sizes}: expected ascending numbers, each once")
    if not request.slots:
        raise RequestError("slots: none; expected at least one KV length")
    names = [name for name, _ in request.trees]
    for name in names:
        if not _NAME.fullmatch(name) or names.count(name) > 1:
            raise TreeError(f"tree {name!r}: expected a name that can stand in a file's name, and each once")
    if ("plain", Topology.plain()) not in request.trees:
        raise TreeError(f"trees {', '.join(names)}: expected the tree of one row, named plain, among them")


def _check_corpus(request: BuildRequest) -> None:
    if request.corpus is None:
        return
    if not any(isinstance(tree, Lookup) for _, tree in request.trees):
        raise RequestError(f"--corpus {request.corpus}: no tree looks tokens up; add --tree lookup:chain:7")
    if not has_tokenizer(request.model):
        raise RequestError(f"--corpus {request.corpus}: {request.model} has no tokenizer to read it with")
    try:
        read_text(request.corpus, MOST_CORPUS_BYTES)
    except OSError as error:
        raise RequestError(f"--corpus {request.corpus}: {error.strerror}; expected UTF-8 text up to 1 MiB") from error


def _check_targets(request: BuildRequest) -> None:
    known = ", ".join(TARGETS)
    if not request.targets or len(set(request.targets)) < len(request.targets):
        raise RequestError(f"--target {','.join(request.targets)}: expected one or more of {known}, each once")
    for name in (*request.targets, *request.precisions):
        if name not in TARGETS:
            raise RequestError(f"--target {name}: expected one or more of {known}")
    for name in request.targets:
        if request.weights not in TARGETS[name].modes:
            able = " or ".join(target.name for target in TARGETS.values() if request.weights in target.modes)
            raise RequestError(
                f"--weights {request.weights}: {name.upper()} graphs need their weights; give --target {able} alone"
            )
        if name in request.precisions:
            TARGETS[name].check(request.precisions[name])
    if request.bitwise and "onnx" not in request.targets:
        raise RequestError("--bitwise: is a step for CPUs; expected --target onnx or onnx,ge")
    if request.whole and "ge" not in request.targets:
        raise RequestError("--one-launch: is a step for NPUs, and slower on a CPU; expected --target ge or onnx,ge")
    if request.whole and request.ranks > 1:
        raise RequestError(
            f"--one-launch: {request.ranks} ranks take the parts of a step one by one; leave one of the two options out"
        )


def _check_precision(request: BuildRequest) -> None:
    name = request.precision
    if name not in get_args(Precision):
        raise RequestError(f"--precision {name}: expected one of {', '.join(get_args(Precision))}")
    packs = name.startswith("nbits")
    if packs and len(request.targets) > 1:
        raise RequestError(f"--precision {name}: packs weights for one target; expected --target onnx or ge")
    # Packed layers are described without weights as well; requantised ones have none before they are made.
    if name != "exact" and request.weights not in (("copy", "none") if packs else ("copy",)):
        raise RequestError(f"--precision {name}: makes weights that no checkpoint holds; expected --weights copy")


def _check_int8(request: BuildRequest) -> None:
    if request.int8_drafter and request.drafter is None:
        raise RequestError("--int8-drafter: there is no --drafter; name one")
    if request.int8_drafter and request.weights == "none":
        raise RequestError("--int8-drafter: rounds the drafter's weights; expected --weights copy or link")
