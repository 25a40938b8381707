"""A plan as a file: JSON with every figure, from which a build takes the trees."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
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
    }


def format_plan(plan: Plan) -> str:
    """`plan` as JSON, a line for each key."""
    lines = (
        f" {json.dumps(key)}: {json.dumps(value, separators=(',', ':'), allow_nan=False)}"
        for key, value in plan_value(plan).items()
    )
    return "{\n" + ",\n".join(lines) + "\n}\n"


def parse_plan(text: str, where: str) -> list[tuple[str, Topology]]:
    """The trees of a plan with their names, plain decoding among them.

    Raises:
        TreeError: it is no plan, or holds something that is no tree.
    """
    trees = expect_format(load_json(text, where), PLAN_FORMAT, _KEYS, where)["trees"]
    if not isinstance(trees, list) or not trees:
        raise TreeError(f"{where}: expected a list of trees, got {trees!r}; plan again")
    return [_read_tree(tree, f"{where}: tree {place}") for place, tree in enumerate(trees)]


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
    }


def _expected(promise: Promise) -> dict[str, Any]:
    heldout = promise.heldout
    return {
        "counted": promise.counted.tokens,
        "heldout": heldout.tokens if heldout else None,
        "heldout_interval": list(heldout.interval) if heldout and heldout.interval else None,
    }
