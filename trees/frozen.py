"""A tensorized tree as a file: rank paths and every buffer, so that a runtime in any language can use it."""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec
import numpy as np

from draftwood.errors import TreeError
from draftwood.trees._json import read_form
from draftwood.trees.invariants import require
from draftwood.trees.tensorize import TreeBuffers, tensorize
from draftwood.trees.topology import Topology

_FORM: Final = "draftwood.tree-buffers"
_VERSION: Final = 2

Row = tuple[int, ...]


class _Frozen(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The file; booleans are 0 and 1."""

    format: Literal["draftwood.tree-buffers"] = _FORM
    version: Literal[2] = _VERSION
    rank_paths: tuple[Row, ...]
    parents: Row
    ranks: Row
    depths: Row
    mask: tuple[Row, ...]
    paths: tuple[Row, ...]


_BUFFERS = _Frozen.__struct_fields__[3:]


def freeze(topology: Topology) -> str:
    """JSON text: ``rank_paths`` and the buffers of `tensorize`."""
    buffers = tensorize(topology)
    tables = {name: getattr(buffers, name).astype(int).tolist() for name in _BUFFERS}
    return msgspec.json.encode(_Frozen(rank_paths=topology.paths, **tables)).decode() + "\n"


def thaw(text: str, where: str) -> tuple[Topology, TreeBuffers]:
    """The topology and its buffers, every invariant checked.

    Raises:
        TreeError: not such a file, a broken invariant (named), or buffers of another tree than the paths.
    """
    frozen = read_form(text, _Frozen, _FORM, _VERSION, where)
    try:
        topology = Topology.from_paths(frozen.rank_paths)
        tables: dict[str, Any] = {name: np.array(getattr(frozen, name), np.int64) for name in _BUFFERS}
    except (TreeError, ValueError, OverflowError) as error:  # not a tree; ragged; beyond 64 bits
        raise TreeError(f"{where}: {error}; build the bundle again") from error
    buffers = TreeBuffers(**tables | {"mask": tables["mask"].astype(np.bool_)})
    require(buffers, where)
    expected = tensorize(topology)
    for name in _BUFFERS:
        if not np.array_equal(getattr(buffers, name), getattr(expected, name)):
            raise TreeError(f"{where}: {name} belongs to another tree than rank_paths; build the bundle again")
    return topology, buffers
