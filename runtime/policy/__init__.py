"""Which gear each step uses: the policies, what they are told of a step, and what they know beforehand."""

from draftwood.runtime.policy.adaptive import Adaptive
from draftwood.runtime.policy.choice import Policies, gears_for, policy_for, widest_gear
from draftwood.runtime.policy.fixed import FixedTree
from draftwood.runtime.policy.gears import PLAIN, Gears
from draftwood.runtime.policy.learned import Learned
from draftwood.runtime.policy.outcome import Asking, Expected, Outcome, Policy

__all__ = [
    "PLAIN",
    "Adaptive",
    "Asking",
    "Expected",
    "FixedTree",
    "Gears",
    "Learned",
    "Outcome",
    "Policies",
    "Policy",
    "gears_for",
    "policy_for",
    "widest_gear",
]
