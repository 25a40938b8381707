"""A plan as a file: JSON with every figure, from which a build takes the trees."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from draftwood.errors import TreeError
from draftwood.trees._json import expect_format, load_json
from draftwood.trees.topology import Topology

if TYPE_CHECKING:
    from draftwood.trees.plan import Plan, PlannedGear, PlannedTree, Promise
    from draftwood.trees.shrinkage import Shrinkage

PLAN_FORMAT = "draftwood.plan"
_KEYS = {
    "contexts",
    "grouped",
    "limits",
    "shrinkage",
    "classes",
    "trees",
    "gears",
    "cost",
    "curve",
    "curve_heldout",
    "baselines",
    "priors",
    "plain",
}


def plan_value(plan: Plan) -> dict[str, Any]:
    """The plan as plain values, keys as in the file."""
    return {
        "format": PLAN_FORMAT,
        "version": 1,
        "contexts": plan.contexts,
        "grouped": plan.grouped,
        "limits": asdict(plan.limits),
        "shrinkage": _shrinkage(plan.shrinkage),
        "classes": list(plan.bounds),
        "trees": [_tree(tree) for tree in plan.trees],
        "gears": [_gear(gear) for gear in plan.gears],
        "cost": None if plan.cost is None else asdict(plan.cost),
        "curve": list(plan.curve),
        "curve_heldout": list(plan.curve_heldout),
        "baselines": [
            {
                "name": one.name,
                "nodes": one.topology.nodes,
                "depth": one.topology.depth,
                "expected": _expected(one.promise),
                "seconds_per_token": one.seconds_per_token,
            }
            for one in plan.baselines
        ],
        "priors": {
            "greedy": plan.greedy.value(),
            "sampled": plan.sampled.value() if plan.sampled else None,
        },
        "plain": [{"slots": slots, "times": _times(times)} for slots, times in plan.plain.items()],
    }


def _times(times: Iterable[tuple[int, float]]) -> list[list[float]]:
    return [[length, seconds] for length, seconds in times]


def format_plan(plan: Plan) -> str:
    """`plan` as JSON, a line for each key."""
    lines = (
        f" {json.dumps(key)}: {json.dumps(value, separators=(',', ':'), allow_nan=False)}"
        for key, value in plan_value(plan).items()
    )
    return "{\n" + ",\n".join(lines) + "\n}\n"


@dataclass(frozen=True, slots=True)
class ReadGear:
    """A gear of a plan: the names of its trees by confidence class, and (tokens of text, seconds a step)."""

    trees: tuple[str, ...]
    slots: int
    times: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """What a build takes of a plan.

    Args:
        trees: with their names, plain decoding among them.
        gears: none where the plan was made without a latency table, so that every tree is for every KV length.
        plain: step times of plain decoding at each KV length of the gears.
        bounds: confidences at which classes begin, but the first.
        priors: as ``CountedPrior.value`` gives them, ``greedy`` and ``sampled``.
    """

    trees: tuple[tuple[str, Topology], ...]
    gears: tuple[ReadGear, ...]
    plain: dict[int, tuple[tuple[int, float], ...]]
    bounds: tuple[float, ...]
    priors: dict[str, Any]


def parse_plan(text: str, where: str) -> ReadPlan:
    """A plan from its file.

    Raises:
        TreeError: it is no plan, or holds something that is no tree or no gear.
    """
    fields = expect_format(load_json(text, where), PLAN_FORMAT, _KEYS, where)
    trees, gears, plain = (_objects(fields, name, where) for name in ("trees", "gears", "plain"))
    if not trees:
        raise TreeError(f"{where}: expected a list of trees, got none; plan again")
    named = tuple(_read_tree(tree, f"{where}: tree {place}") for place, tree in enumerate(trees))
    rows = {name: tree.rows for name, tree in named}
    read = [_read_gear(gear, rows, f"{where}: gear {place}") for place, gear in enumerate(gears)]
    bounds, priors = fields["classes"], fields["priors"]
    if not isinstance(bounds, list) or not all(type(bound) is float and 0 < bound < 1 for bound in bounds):
        raise TreeError(f"{where}: classes: expected confidences between 0 and 1, got {bounds!r:.80}; plan again")
    if any(gear and len(gear.trees) != len(bounds) + 1 for gear in read):
        raise TreeError(f"{where}: expected {len(bounds) + 1} trees a gear, one for each class; plan again")
    if not isinstance(priors, dict) or set(priors) != {"greedy", "sampled"}:
        raise TreeError(f"{where}: priors: expected greedy and sampled, got {priors!r:.80}; plan again")
    alone = [_read_plain(one, f"{where}: plain {place}") for place, one in enumerate(plain)]
    kept = tuple(gear for gear in read if gear is not None)
    if kept and {gear.slots for gear in kept} != {slots for slots, _ in alone}:
        raise TreeError(f"{where}: expected plain decoding at the gears' KV lengths and no others; plan again")
    return ReadPlan(named, kept, dict(alone), tuple(bounds), priors)


def _objects(fields: dict[str, Any], name: str, where: str) -> list[dict[str, Any]]:
    found = fields[name]
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise TreeError(f"{where}: expected a list of {name}, each an object, got {found!r:.80}; plan again")
    return found


def _read_gear(gear: dict[str, Any], rows: dict[str, int], where: str) -> ReadGear | None:
    """A gear, or None where it has no KV length."""
    trees = gear.get("trees")
    if not isinstance(trees, list) or not trees or not all(isinstance(name, str) and name in rows for name in trees):
        raise TreeError(f"{where}: expected the names of trees of this plan, got {trees!r:.80}; plan again")
    if len({rows[name] for name in trees}) != 1:
        raise TreeError(f"{where}: its trees have different numbers of rows; one graph serves them all; plan again")
    if gear.get("slots") is None:
        return None
    return ReadGear(tuple(trees), _read_slots(gear, where), _read_times(gear, where))


def _read_plain(one: dict[str, Any], where: str) -> tuple[int, tuple[tuple[int, float], ...]]:
    return _read_slots(one, where), _read_times(one, where)


def _read_slots(one: dict[str, Any], where: str) -> int:
    slots = one.get("slots")
    if type(slots) is not int or not 0 < slots < 2**31:
        raise TreeError(f"{where}: slots: expected a KV length, got {slots!r:.80}; plan again")
    return slots


def _read_times(one: dict[str, Any], where: str) -> tuple[tuple[int, float], ...]:
    times = one.get("times")
    if not isinstance(times, list) or not times or not all(_is_time(time) for time in times):
        raise TreeError(f"{where}: times: expected pairs of tokens and seconds, got {times!r:.80}; plan again")
    return tuple((length, float(seconds)) for length, seconds in times)


def _is_time(time: object) -> bool:
    if not isinstance(time, list) or len(time) != 2:
        return False
    length, seconds = time
    return type(length) is int and length >= 0 and type(seconds) in (int, float) and 0 < seconds < math.inf


def _read_tree(value: object, where: str) -> tuple[str, Topology]:
    if (
        not isinstance(value, dict)
        or not isinstance(value.get("name"), str)
        or not isinstance(value.get("paths"), list)
    ):
        raise TreeError(f"{where}: expected an object with a name and a list of paths, got {value!r:.80}; plan again")
    try:
        return value["name"], Topology.from_paths(value["paths"])
    except TreeError as error:
        raise TreeError(f"{where}: {error}") from error


def _shrinkage(shrinkage: Shrinkage) -> dict[str, Any]:
    gains = [{"strength": _strength(strength), "tuning": gain} for strength, gain in shrinkage.gains.items()]
    return {"strength": _strength(shrinkage.strength), "tried": gains}


def _strength(strength: float) -> float | str:
    return "infinite" if math.isinf(strength) else strength  # JSON has no infinity


def _tree(tree: PlannedTree) -> dict[str, Any]:
    heldout = None if tree.heldout_T is None else [round(float(share), 6) for share in tree.heldout_T[1:]]
    return {
        "name": tree.name,
        "class": tree.confidence_class,
        "rows": tree.topology.rows,
        "depth": tree.topology.depth,
        "width": tree.topology.width,
        "paths": [list(path) for path in tree.topology.paths],
        "expected": _expected(tree.promise),
        "shares": {"counted": [round(float(share), 6) for share in tree.counted_T[1:]], "heldout": heldout},
    }


def _gear(gear: PlannedGear) -> dict[str, Any]:
    return {
        "trees": list(gear.trees),
        "rows": gear.rows,
        "slots": gear.slots,
        "expected": _expected(gear.promise),
        "seconds": gear.seconds,
        "times": _times(gear.times),
    }


def _expected(promise: Promise) -> dict[str, Any]:
    heldout = promise.heldout
    return {
        "counted": promise.counted.tokens,
        "heldout": heldout.tokens if heldout else None,
        "heldout_interval": list(heldout.interval) if heldout and heldout.interval else None,
    }
