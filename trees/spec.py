"""Trees as the command line names them: ``plain``, ``chain:3``, ``full:3x2``, ``backbone:4:5``, files, plans.

``budget:24x5x4`` names no shape but a budget: at every step the drafter chooses the tree that fits it.
``lookup:chain:7`` is a tree whose tokens are looked up in the text so far, without a drafter.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace

from draftwood.errors import TreeError
from draftwood.planned import Gear, Planning, named_gears
from draftwood.trees.formats import parse_medusa, parse_tree, read_text
from draftwood.trees.plan_file import Plan, parse_plan
from draftwood.trees.topology import Topology

MAX_ROWS = 256
KINDS = "plain, chain:D, full:K1xK2, backbone:D:K, medusa:FILE, tree:FILE, plan:FILE, budget:MxDxK or lookup:SPEC"
# Chains of looked-up text, by rows. With a plan only the long ones are added: the plan rates shorter trees itself. The
# deepest is how far looked-up text may continue a drafter's tree.
LOOKUPS = {4: "lookup:chain:3", 8: "lookup:chain:7", 16: "lookup:chain:15"}
LONG_ROWS = 8


@dataclass(frozen=True, slots=True)
class Budget:
    """A tree whose shape the drafter chooses at every step (EAGLE-2, Li et al., 2024, arXiv 2406.16858).

    Args:
        nodes: M, the draft nodes that are kept.
        depth: D, the levels that are grown.
        width: k, the candidates of a node, and the nodes of a level that are expanded.

    Raises:
        TreeError: a size is below 1, or more nodes are to be kept than are grown.
    """

    nodes: int
    depth: int
    width: int

    def __post_init__(self) -> None:
        grown = grown_nodes(self.depth, self.width)
        if min(self.nodes, self.depth, self.width) < 1 or self.nodes > grown:
            raise TreeError(
                f"budget of {self.nodes} nodes, depth {self.depth}, {self.width} candidates: expected 1 to"
                f" {max(grown, 1)} nodes, for K + (D - 1) * K * K are grown; raise the candidates or the depth"
            )

    @property
    def rows(self) -> int:
        """T: the rows of a verify step, the root counted."""
        return self.nodes + 1


class Lookup(Topology):
    """A tree whose tokens are looked up in the text so far; no equal of the drafter's tree of the same shape."""

    __slots__ = ()


def grown_nodes(depth: int, width: int) -> int:
    """The nodes that a budget tree is chosen from: k at the first level, k for each of k nodes at every other."""
    return width + max(depth - 1, 0) * width**2


@dataclass(frozen=True, slots=True)
class Specs:
    """The trees of ``--tree``, and the gears and figures of the plan that it names.

    Args:
        trees: each with a name, plain decoding first.
        gears: the plan's, plain decoding at each KV length first; empty if every tree serves every length.
        plan: the named plan's part for a policy, if a plan was named.
        models: digests of the models that the first plan was counted for, by what each is; empty if unknown.
    """

    trees: tuple[tuple[str, Topology | Budget], ...]
    gears: tuple[Gear, ...]
    plan: Planning | None
    models: Mapping[str, str] = field(default_factory=dict)


def read_specs(text: str) -> Specs:
    """The trees of ``--tree SPEC[,SPEC...]`` with the gears and figures of a plan, if one is named.

    Raises:
        TreeError: as `parse_specs`, or a plan with KV lengths together with another tree for the drafter.
    """
    trees = tuple(parse_specs(text))
    named = [spec.strip().partition(":")[2] for spec in text.split(",") if spec.strip().startswith("plan:")]
    if not named:
        return Specs(trees, (), None)
    plans = [parse_plan(_file_text(file, f"tree plan:{file}"), file) for file in named]
    looked_up = tuple(name for name, tree in trees if isinstance(tree, Lookup))
    if any(plan.gears for plan in plans) and text.count(",") > len(looked_up):
        raise TreeError(
            f"tree {text!r}: a plan with KV lengths stands alone, or with trees that are looked up; leave the other"
            " trees out, or plan without --latency"
        )
    names = _own_names(trees, plans[0])
    gears = tuple(replace(gear, tree=names[gear.tree]) for gear in plans[0].gears)
    lengths = sorted({gear.slots for gear in gears})
    gears += named_gears((name, slots) for name in looked_up for slots in lengths)
    return Specs(trees, gears, plans[0].planning.named(names) if len(plans) == 1 else None, plans[0].models)


def _own_names(trees: tuple[tuple[str, Topology | Budget], ...], plan: Plan) -> dict[str, str]:
    """The names that a plan's trees have in ``trees``; equal trees share a name."""
    names: dict[Topology | Budget, str] = {tree: name for name, tree in trees}
    return {tree.name: names[tree.topology] for tree in plan.trees}


def parse_specs(text: str) -> list[tuple[str, Topology | Budget]]:
    """The trees of ``--tree SPEC[,SPEC...]``, each with a name that can stand in a file name.

    Plain decoding comes first, asked for or not; a tree that occurs twice keeps its first name. A file with
    several Medusa trees takes ``medusa:FILE#NAME``; ``plan:FILE`` stands for all trees of a plan.

    Raises:
        TreeError: an unknown kind, a bad or zero number, an unreadable file, or more than 256 rows.

    Example:
        >>> [name for name, _ in parse_specs("chain:3,full:3x2x1,chain:3")]
        ['plain', 'chain-3', 'full-3x2x1']
    """
    trees: dict[Topology | Budget, str] = {Topology.plain(): "plain"}
    for spec in text.split(","):
        for name, topology in _parse_spec(spec.strip()):
            if topology not in trees:
                trees[topology] = _unique(name, trees.values())
    return [(name, topology) for topology, name in trees.items()]


def _parse_spec(spec: str) -> Sequence[tuple[str, Topology | Budget]]:
    kind, _, rest = spec.partition(":")
    readers: dict[str, Callable[[str, str], tuple[str, Topology]]] = {
        "chain": _chain,
        "full": _full,
        "backbone": _backbone,
        "medusa": _medusa,
        "tree": _tree,
    }
    if spec == "plain":
        return [("plain", Topology.plain())]
    if kind == "budget":
        return [_budget(rest, f"tree {spec!r}")]
    if kind == "lookup":
        return _lookup(rest, f"tree {spec!r}")
    if kind == "plan":
        return _plan(rest, f"tree {spec!r}")
    if kind not in readers:
        raise TreeError(f"tree {spec!r}: unknown kind {kind!r}; expected {KINDS}")
    return [readers[kind](rest, f"tree {spec!r}")]


def _chain(rest: str, where: str) -> tuple[str, Topology]:
    (depth,) = _numbers(rest, None, 1, where)
    _check_rows(1 + depth, where)
    return f"chain-{depth}", Topology.chain(depth)


def _full(rest: str, where: str) -> tuple[str, Topology]:
    widths = _numbers(rest, "x", None, where)
    rows = level = 1
    for width in widths:
        level *= width
        rows += level
    _check_rows(rows, where)
    return f"full-{'x'.join(map(str, widths))}", Topology.full(widths)


def _backbone(rest: str, where: str) -> tuple[str, Topology]:
    depth, k = _numbers(rest, ":", 2, where)
    _check_rows(1 + depth * k, where)
    return f"backbone-{depth}-{k}", Topology.backbone(depth, k)


def _medusa(rest: str, where: str) -> tuple[str, Topology]:
    file, _, name = rest.partition("#")
    topology = parse_medusa(_file_text(file, where), file, name or None)
    _check_rows(topology.rows, where)
    return _slug(name or Path(file).stem), topology


def _tree(rest: str, where: str) -> tuple[str, Topology]:
    topology = parse_tree(_file_text(rest, where), rest)
    _check_rows(topology.rows, where)
    return _slug(Path(rest).stem), topology


def _budget(rest: str, where: str) -> tuple[str, Budget]:
    nodes, depth, width = _numbers(rest, "x", 3, where)
    _check_rows(1 + nodes, where)
    try:
        return f"budget-{nodes}x{depth}x{width}", Budget(nodes, depth, width)
    except TreeError as error:
        raise TreeError(f"{where}: {error}") from None


def _lookup(rest: str, where: str) -> list[tuple[str, Topology | Budget]]:
    if rest.startswith("lookup:"):
        raise TreeError(f"{where[:100]}: lookup: stands twice; leave one out")
    lookups: list[tuple[str, Topology | Budget]] = []
    for name, tree in _parse_spec(rest):
        if not isinstance(tree, Topology) or not tree.nodes:
            raise TreeError(f"{where}: expected a tree of a fixed shape after lookup:, such as lookup:chain:7")
        lookups.append((f"lookup-{name}", Lookup(tree.parents, tree.ranks)))
    return lookups


def _plan(rest: str, where: str) -> list[tuple[str, Topology]]:
    trees = [(_slug(tree.name), tree.topology) for tree in parse_plan(_file_text(rest, where), rest).trees]
    for _, topology in trees:
        _check_rows(topology.rows, where)
    return trees


def _file_text(file: str, where: str) -> str:
    if not file:
        raise TreeError(f"{where}: expected a file name after the colon, got none")
    try:
        path = Path(file).expanduser()
    except RuntimeError as error:
        raise TreeError(f"{where}: no such user as in {file}; write the path in full") from error
    return read_text(path)


def _numbers(text: str, separator: str | None, count: int | None, where: str) -> tuple[int, ...]:
    parts = text.split(separator) if separator else [text]
    # Six digits are far past MAX_ROWS; more would only make Python's integers slow.
    if (count and len(parts) != count) or not all(re.fullmatch("0*[1-9][0-9]{0,5}", part) for part in parts):
        raise TreeError(f"{where}: expected whole numbers from 1 to 999999, as in {KINDS}; got {text!r}")
    return tuple(map(int, parts))


def _check_rows(rows: int, where: str) -> None:
    if rows > MAX_ROWS:
        raise TreeError(f"{where}: expected at most {MAX_ROWS} rows, root counted, got {rows}; ask for fewer")


def _slug(name: str) -> str:
    return re.sub("[^A-Za-z0-9._-]+", "-", name).strip(".-")[:64] or "tree"


def _unique(name: str, taken: Iterable[str]) -> str:
    # Compared without case, since a name becomes a file name and some file systems ignore case.
    used = {other.casefold() for other in taken}
    numbered = (f"{name}-{number}" for number in range(2, len(used) + 3))
    return next(option for option in (name, *numbered) if option.casefold() not in used)
