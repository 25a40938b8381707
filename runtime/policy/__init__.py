"""The choice of each step's gear: the policies, what they learn of a step, and what they know beforehand."""

from draftwood.runtime.policy.adaptive import Adaptive, Learned
from draftwood.runtime.policy.choice import Policies, a_gear, gears_for, widest_gear
from draftwood.runtime.policy.gears import PLAIN, Gears
from draftwood.runtime.policy.policy import Asking, Expected, FixedTree, Policy

__all__ = [
    "PLAIN",
    "Adaptive",
    "Asking",
    "Expected",
    "FixedTree",
    "Gears",
    "Learned",
    "Policies",
    "Policy",
    "a_gear",
    "gears_for",
    "widest_gear",
]
