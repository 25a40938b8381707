"""The mask token of drafters that put it where a token is not known yet, as config.json names it."""

from __future__ import annotations

from collections.abc import Iterable

from draftwood.compiler.checkpoints.fields import Fields
from draftwood.compiler.teachers.config import TeacherConfig

# speculators, SpecForge and Automodel; vLLM; Amazon.
_FIELDS = ("mask_token_id", "pard_token", "ptd_token_id")


def read_mask_token(sources: Iterable[Fields], teacher: TeacherConfig) -> int:
    """The mask token, from any object of config.json and any field that it is published in; they must agree.

    Raises:
        CheckpointError: no field names it, two differ, or it is no token of the teacher.
    """
    sources = tuple(sources)
    named = [(source, name) for source in sources for name in _FIELDS if source.get(name) is not None]
    found = sorted({source.whole(name) for source, name in named})
    if not found:
        sources[0].fail("mask_token_id", "the id of the mask token; if the writer left it out, its training knows it")
    source, name = named[0]
    if len(found) > 1:
        source.fail(name, f"the same id wherever the mask token is named, not {' and '.join(map(str, found))}")
    if not 0 <= found[0] < teacher.vocabulary:
        source.fail(name, f"an id of the teacher, below {teacher.vocabulary}")
    return found[0]
