"""Which gears a bundle gets, and what its manifest says of the plan that they come from."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from draftwood.errors import TreeError
from draftwood.planning import Planning, StepTime
from draftwood.trees.plan_file import ReadPlan
from draftwood.trees.spec import GearSpec, gear_names


def planning_of(plan: ReadPlan, gears: Sequence[GearSpec]) -> Planning:
    """What the runtime's policy is told of a plan.

    Raises:
        TreeError: priors that are none.
    """
    steps = [
        StepTime(gear=name, length=length, us=round(seconds * 1e6, 3))
        for gear, name in zip(gears, gear_names(gears), strict=True)
        for length, seconds in gear.times
    ]
    value = {"bounds": plan.bounds, **plan.priors, "times": steps}
    try:
        return msgspec.convert(msgspec.to_builtins(value), Planning)
    except msgspec.ValidationError as error:
        raise TreeError(f"plan: {error}; plan again") from error
