"""Every GE operator on a CPU with torch; importing the package fills the table."""

from draftwood.compiler.ge.operators import (  # noqa: F401 (they fill the table)
    arithmetic,
    collective,
    experts,
    int4,
    network,
    reduction,
    selection,
    shaping,
)
from draftwood.compiler.ge.operators.table import OPERATORS, BoundNode, attribute

__all__ = ["OPERATORS", "BoundNode", "attribute"]
