"""Which gear each step uses: the policies, what they are told of a step, and what they know beforehand."""

from draftwood.runtime.policy.adaptive import Adaptive, Learned
from draftwood.runtime.policy.choice import Policies, policy_for
from draftwood.runtime.policy.fixed import FixedTree
from draftwood.runtime.policy.gears import PLAIN, Gears
from draftwood.runtime.policy.outcome import Expected, Outcome, Policy

__all__ = [
    "PLAIN",
    "Adaptive",
    "Expected",
    "FixedTree",
    "Gears",
    "Learned",
    "Outcome",
    "Policies",
    "Policy",
    "policy_for",
]
