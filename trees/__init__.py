"""Draft trees: topologies, their buffers and invariants, acceptance, statistics, plans, and tree files.

The planner (calibration, search, plan) is imported by its modules' own names: a runtime needs none of it.

Glossary, one word a thing:

teacher         the model whose output is reproduced exactly
drafter         what proposes tokens
topology        the shape of a draft tree: rows in parent-before-child order
root            row 0, the pending token: sampled by the teacher, not yet in its cache; its own parent
row             a line of the verify step: the root or a draft node, T of them
node            a draft node, M = T - 1 of them; the root is not counted
depth           steps from the root (depth 0); D is that of the deepest node
rank            the place of a token among its parent's candidates, 0 the best
rank path       a node named by the ranks that lead to it: (0, 2)
width           candidates a drafter must offer per node: the largest rank + 1
tree mask       which rows a row sees: its ancestors and itself (True = visible)
path            in the buffers, the rows from the root to a row, the last one repeated
draw            the teacher's one token at a row; greedy decoding draws the argmax
bonus           the draw at the last accepted row, the next root
accept length   tokens gained per verify step, the bonus token counted
context         a position in a text on which a drafter is calibrated, with the rank path that the truth took
gear            one static shape: a KV length and trees of equally many rows; plain decoding is always one
"""

from draftwood.trees.acceptance import Accepted, walk, walk_tables
from draftwood.trees.adjacency import parse_nxdi
from draftwood.trees.draw import draw_text
from draftwood.trees.formats import (
    parse_draftwood,
    parse_medusa,
    parse_tree,
    read_tree,
)
from draftwood.trees.invariants import Violation, is_tree, require, violations
from draftwood.trees.spec import parse_specs
from draftwood.trees.tensorize import TreeBuffers, tensorize, tree_tokens
from draftwood.trees.topology import Topology

__all__ = [
    "Accepted",
    "Topology",
    "TreeBuffers",
    "Violation",
    "draw_text",
    "is_tree",
    "parse_draftwood",
    "parse_medusa",
    "parse_nxdi",
    "parse_specs",
    "parse_tree",
    "read_tree",
    "require",
    "tensorize",
    "tree_tokens",
    "violations",
    "walk",
    "walk_tables",
]
