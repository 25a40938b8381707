"""What every GE operator computes, on a CPU with torch; importing the package fills the table."""

from draftwood.compiler.ge.operators import arithmetic, collective, experts, network, reduction, selection, shaping
from draftwood.compiler.ge.operators.table import OPERATORS, Call

__all__ = ["OPERATORS", "Call", "arithmetic", "collective", "experts", "network", "reduction", "selection", "shaping"]
