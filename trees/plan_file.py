"""A plan, as the planner returns it and as its file has it: trees, gears, priors, and the figures that say why.

Trees are made from counted contexts. Promises are reported for held-out contexts, which no tree has seen. All times are
in microseconds.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from draftwood.planned import FrozenFields, Gear, Name, Planning
from draftwood.trees._json import load_json, read_form
from draftwood.trees.topology import Topology

PLAN_FORMAT: Final = "draftwood.plan"
PLAN_VERSION: Final = 5


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The limits of a plan: draft nodes, depth, ranks below ``children``, and gears with plain decoding."""

    nodes: int
    depth: int | None = None
    children: int | None = None
    gears: int = 4


class ExpectedLength(FrozenFields, frozen=True):
    """An expected accept length, bonus counted.

    Args:
        tokens: per verify step.
        interval: 95 %, cluster-robust over folds of whole texts; None if fewer than two folds have contexts.
        contexts: that it was taken over.
    """

    tokens: float
    interval: tuple[float, float] | None
    contexts: int


class Promise(FrozenFields, frozen=True):
    """A tree's expected accept length, bonus counted; ``heldout`` is None if nothing was held out."""

    counted: ExpectedLength
    heldout: ExpectedLength | None


class PlannedTree(FrozenFields, frozen=True):
    """A tree's rank paths, and its expected accept length. ``counted_shares`` and ``heldout_shares`` are parallel to
    the paths: the share of contexts through each node."""

    name: Name
    paths: tuple[tuple[int, ...], ...]
    promise: Promise
    counted_shares: tuple[float, ...]
    heldout_shares: tuple[float, ...] | None

    @property
    def topology(self) -> Topology:
        """The tree itself; TreeError if the paths are those of none."""
        return Topology.from_paths(self.paths)


class Served(FrozenFields, frozen=True):
    """``texts`` texts in a class of context lengths, their share of the tokens, and the gears that serve them fastest,
    one for each launch. A token takes ``us_per_token`` of the device, and ``texts`` times that of a text's own time."""

    texts: int
    slots: int
    share: float
    gears: tuple[Name, ...]
    us_per_token: float
    plain_us_per_token: float


class Rivals(FrozenFields, frozen=True):
    """Device time per token of ``texts`` texts for the plan and three rivals. The rivals are plain batches, the best
    chain for each number of texts, and trees planned for one text."""

    texts: int
    share: float
    us_per_token: float
    plain_us_per_token: float
    chains_us_per_token: float
    single_us_per_token: float


class Stair(FrozenFields, frozen=True):
    """A stair of the cost: a step's time with so many texts and rows, and its best gain, over all lengths."""

    texts: int

    slots: int
    rows: int
    us: float
    expected: float
    us_per_token: float


class Cost(FrozenFields, frozen=True):
    """Expected time per token of the chosen gears.

    Args:
        bound: what no set of candidate gears within the limits can beat on the counted contexts.
        heldout: the same gears, each class served as planned, on held-out contexts; None without any.
        too_long: contexts that the table's largest KV length does not hold; left out.
    """

    us_per_token: float
    plain_us_per_token: float
    bound: float
    exact: bool
    candidates: int
    heldout: float | None
    plain_heldout: float | None
    too_long: int
    source: str
    served: tuple[Served, ...]
    stairs: tuple[Stair, ...]
    rivals: tuple[Rivals, ...]


class Baseline(FrozenFields, frozen=True):
    """A tree by another method; its time per token if each context took it at the KV length it needs.

    ``us_per_token`` is None without a latency table, or if the table has no such step or draft.
    """

    name: Name
    nodes: int
    depth: int
    promise: Promise
    us_per_token: float | None


class Plan(FrozenFields, frozen=True, kw_only=True):
    """A whole plan, as its file holds it.

    Args:
        contexts: the number of counted and of held-out contexts.
        models: digests of the models whose contexts they are, by what each is; empty if unknown.
        grouped: whether intervals take a text as one observation; otherwise they take a context.
        gears: plain decoding at each KV length, then gears that draft. Without a latency table there are none, and
            every tree serves every KV length.
        planning: the plan's part for a bundle's policy.
        curve: the best expected accept length on counted contexts with 0, 1, ..., n draft nodes.
        curve_heldout: the same trees' accept length on held-out contexts; empty without any.
    """

    format: Literal["draftwood.plan"] = PLAN_FORMAT
    version: Literal[5] = PLAN_VERSION
    contexts: dict[str, int]
    models: dict[str, str] = msgspec.field(default_factory=dict)
    grouped: bool
    limits: Limits
    trees: tuple[PlannedTree, ...]
    gears: tuple[Gear, ...]
    planning: Planning
    cost: Cost | None
    curve: tuple[float, ...]
    curve_heldout: tuple[float, ...]
    baselines: tuple[Baseline, ...]

    def __post_init__(self) -> None:
        topologies = {tree.name: tree.topology for tree in self.trees}
        rows = {name: tree.rows for name, tree in topologies.items()}
        if not rows or len(rows) < len(self.trees):
            raise ValueError("trees: expected one or more, each with a name of its own")
        for gear in self.gears:
            if gear.tree not in rows:
                raise ValueError(f"gear {gear.name}: expected a tree of this plan, got {gear.tree}")
        names = {gear.name for gear in self.gears}
        plain = {gear.slots for gear in self.gears if rows[gear.tree] == 1}
        if len(names) < len(self.gears) or {gear.slots for gear in self.gears} != plain:
            raise ValueError("gears: expected different names, and plain decoding at each of their KV lengths")
        if {time.gear for time in self.planning.times} != names:
            raise ValueError("planning: expected step times of the gears and of no others")
        counted = {name for prior in (self.planning.greedy, self.planning.sampled) if prior for name in prior.reached}
        if strange := sorted(counted - rows.keys()):
            raise ValueError(f"planning: shares of tree {strange[0]}; expected a tree of this plan")
        for fault in self.planning.faults({name: tree.depth for name, tree in topologies.items()}):
            raise ValueError(fault)


def format_plan(plan: Plan) -> str:
    """``plan`` as JSON; equal plans give equal text."""
    return msgspec.json.encode(plan).decode() + "\n"


def parse_plan(text: str, where: str) -> Plan:
    """A plan from its file.

    Raises:
        TreeError: it is no plan of this version, or holds a key twice, or something that is no tree or no gear.
    """
    load_json(text, where)
    return read_form(text, Plan, PLAN_FORMAT, PLAN_VERSION, where)
