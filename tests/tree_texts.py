"""A tree's text in every form that is read, as others write it."""

import json

from draftwood.trees import Topology


def written(tree: Topology, form: str) -> str:
    """``tree`` in a form; the adjacency of nxdi leaves out ranks, so siblings must have them without a gap."""
    below = {str(row): [str(child) for child in tree.children(row)] for row in range(tree.rows)}
    texts = {
        "draftwood": json.dumps({"format": "draftwood.tree", "version": 1, "paths": tree.paths}),
        "medusa": json.dumps(tree.paths),
        "tuples": str(list(tree.paths)),
        "nxdi": json.dumps({row: children for row, children in below.items() if children}),
    }
    return texts[form]
