"""A tensorized tree as a file: rank paths and every buffer, so that a runtime in any language can use it."""

from __future__ import annotations

import json
from typing import Any, cast

import numpy as np

from draftwood.errors import TreeError
from draftwood.trees._json import expect_format, load_json
from draftwood.trees.invariants import require
from draftwood.trees.tensorize import TreeBuffers, tensorize
from draftwood.trees.topology import Topology

_FORM = "draftwood.tree-buffers"
_BUFFERS = ("parents", "ranks", "depths", "valid", "mask", "ancestors", "paths")


def freeze(topology: Topology) -> str:
    """JSON text: ``paths`` (rank paths) and the buffers of `tensorize`, booleans as 0 and 1."""
    buffers = tensorize(topology)
    tables = {name: getattr(buffers, name).astype(int).tolist() for name in _BUFFERS}
    fields = {"rank_paths": [list(path) for path in topology.paths], **tables}
    lines = ",\n".join(
        f" {json.dumps(key)}: {json.dumps(value, separators=(',', ':'))}" for key, value in fields.items()
    )
    return f'{{"format": "{_FORM}", "version": 1,\n{lines}}}\n'


def thaw(text: str, where: str) -> tuple[Topology, TreeBuffers]:
    """The topology and its buffers, every invariant checked.

    Raises:
        TreeError: not such a file, a broken invariant (named), or buffers of another tree than the paths.
    """
    fields = cast(Any, expect_format(load_json(text, where), _FORM, {"rank_paths", *_BUFFERS}, where))
    try:
        topology = Topology.from_paths([tuple(path) for path in fields["rank_paths"]])
        tables: dict[str, Any] = {name: np.array(fields[name], np.int64) for name in _BUFFERS}
    except (TypeError, ValueError, OverflowError) as error:
        raise TreeError(f"{where}: a table is not made of whole numbers: {error}; build the bundle again") from error
    for name in ("valid", "mask"):
        tables[name] = tables[name].astype(np.bool_)
    buffers = TreeBuffers(**tables)
    require(buffers, where)
    expected = tensorize(topology)
    for name in _BUFFERS:
        if not np.array_equal(getattr(buffers, name), getattr(expected, name)):
            raise TreeError(f"{where}: {name} belongs to another tree than rank_paths; build the bundle again")
    return topology, buffers
