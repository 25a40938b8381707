"""The bundles that an evaluation measures."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from draftwood.errors import RequestError
from draftwood.files import real_path
from draftwood.manifest import Manifest, read_manifest
from draftwood.tools import demo
from draftwood.tools.measure.runner import PLAIN

# A name becomes part of keys and of names of ways, which slashes and spaces divide.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class NamedBundle(NamedTuple):
    """A bundle's folder and its manifest."""

    folder: str
    manifest: Manifest


def read_bundles(named: Sequence[str]) -> dict[str, NamedBundle]:
    """Bundles by name, each given as ``DIR``, ``demo`` or ``NAME=DIR``.

    Raises:
        BundleError: a folder that is no bundle.
        RequestError: two of one name, a name with other characters, no tokenizer, or bundles of different teachers.
    """
    givens: dict[str, NamedBundle] = {}
    teachers: dict[str, str] = {}
    for spec in named:
        before, equals, after = spec.partition("=")
        folder = real_path(demo.bundle(after if equals else spec))
        name = before if equals else Path(spec).name
        if not _NAME.fullmatch(name) or name == PLAIN or name in givens:
            raise RequestError(
                f"--bundle {spec}: its name is {name!r}; expected NAME=DIR, a name of its own of letters, digits, . _ -"
            )
        manifest = read_manifest(folder)
        if not manifest.tokenizer:
            raise RequestError(f"--bundle {spec}: has no tokenizer, so text prompts cannot be measured")
        givens[name], teachers[manifest.teacher.digest] = NamedBundle(str(folder), manifest), name
    if len(teachers) > 1:
        raise RequestError(
            f"--bundle: {' and '.join(teachers.values())} hold different teachers; measure one at a time"
        )
    return givens


def check_one_text(bundles: Mapping[str, NamedBundle], section: str) -> None:
    """RequestError if these bundles of a teacher round its weights differently, and so write different texts."""
    (first, given), *others = bundles.items()
    for name, other in others:
        if other.manifest.teacher.config != given.manifest.teacher.config:
            raise RequestError(
                f"--bundle: {first} and {name} hold the teacher in different precisions, so their texts differ, and"
                f" {section} compares them; measure one precision at a time, or take --sections without {section}"
            )
