"""Bundles of one's own, which an evaluation measures in the place of the demo pairs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from draftwood.errors import RequestError
from draftwood.manifest import Manifest, read_manifest
from draftwood.runtime.bundle import Bundle
from draftwood.tools.lab.runner import PLAIN
from draftwood.trees import Topology
from draftwood.trees.spec import Budget

if TYPE_CHECKING:
    from draftwood.tools.lab.bundles import Trees

# A name stands in keys and names of ways, whose parts are told apart by slashes and spaces.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class Given(NamedTuple):
    """A bundle of one's own."""

    folder: str
    manifest: Manifest


def read_given(named: Sequence[str]) -> dict[str, Given]:
    """Bundles by name, each given as ``DIR`` or ``NAME=DIR``.

    Raises:
        BundleError: a folder that is no bundle.
        RequestError: two of one name, a name with other characters, no tokenizer, or bundles of different teachers.
    """
    found: dict[str, Given] = {}
    teachers: dict[str, str] = {}
    for one in named:
        before, equals, behind = one.partition("=")
        folder = Path(behind if equals else one).resolve()
        name = before if equals else folder.name
        if not _NAME.fullmatch(name) or name == PLAIN or name in found:
            raise RequestError(
                f"--bundle {one}: its name is {name!r}; expected NAME=DIR, a name of its own of letters, digits, . _ -"
            )
        manifest = read_manifest(folder)
        if not manifest.tokenizer:
            raise RequestError(f"--bundle {one}: has no tokenizer, so text prompts cannot be measured")
        found[name], teachers[manifest.teacher.digest] = Given(str(folder), manifest), name
    if len(teachers) > 1:
        raise RequestError(
            f"--bundle: {' and '.join(teachers.values())} hold different teachers; measure one at a time"
        )
    return found


@cache
def own_trees(folder: str) -> tuple[Trees, dict[str, str]]:
    """A bundle's trees as M nodes by D levels, plain decoding first; and what the bundle calls each."""
    trees, names = list(_trees(Bundle.open(Path(folder)))), dict[str, str]()
    for label, _, own in trees:
        names.setdefault(label, own)
    return tuple((label, tree) for label, tree, own in trees if names[label] == own), names


def _trees(bundle: Bundle) -> Iterator[tuple[str, Topology | Budget, str]]:
    looked_up = {gear.tree for gear in bundle.manifest.gears if gear.looks_up}
    for one in sorted(bundle.manifest.trees, key=lambda tree: tree.rows):
        if one.rows == 1:
            yield PLAIN, Topology.plain(), one.name
        elif one.name not in looked_up:
            tree = bundle.trees[one.name][0] if one.file else Budget(one.rows - 1, one.depth, one.width)
            yield f"M {one.rows - 1} D {one.depth}", tree, one.name
