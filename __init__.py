"""Draftwood: draft trees planned offline, frozen into static graphs, chosen per step by a thin runtime.

The folders of the repository are the packages of this namespace, and imports run one way:
``trees`` < ``kernels`` < ``compiler``; ``runtime`` needs neither ``compiler`` nor torch; ``tools`` uses all.
"""

from draftwood.environment import shield_torch

__version__ = "0.1.0"

# Here, since everything of Draftwood that imports torch imports this package first.
shield_torch()
