"""The vocabulary of a drafter: how many rows its tables have, and which of the teacher's ids it may propose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from draftwood.compiler.checkpoints.fields import Fields
from draftwood.compiler.checkpoints.safetensors_file import Entry
from draftwood.compiler.checkpoints.tensors import Reader
from draftwood.compiler.teachers.config import TeacherConfig
from draftwood.errors import CheckpointError

# The map from draft ids to the teacher's, as an offset, and the teacher's ids that it covers, as 0 and 1.
MAPS = {"d2t": ("I64", "I32"), "t2d": ("BOOL", "I64", "I32", "U8")}
# Tables are padded to a multiple of one of these.
_PADDING = (8, 16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Rows of a drafter's tables; those past the teacher's last id are padding and are cut off."""

    # The teacher's ids.
    teacher: int
    # Rows of its own embedding, and length of t2d.
    stored: int
    # Rows of an output matrix of its own, and length of d2t.
    head: int

    @property
    def draft(self) -> int:
        """Tokens that can be proposed."""
        return min(self.head, self.teacher)


def read_vocabulary(fields: Fields, inner: Fields, teacher: TeacherConfig) -> Vocabulary:
    """``draft_vocab_size`` of config.json and ``vocab_size`` of the block's fields, held against the teacher."""
    known, stored = teacher.vocabulary, inner.whole("vocab_size")
    if stored != known and stored not in {-(-known // size) * size for size in _PADDING}:
        inner.fail("vocab_size", f"{known} as the teacher has, maybe padded; use the drafter of this teacher")
    head = fields.whole("draft_vocab_size", stored)
    if not 1 <= head <= known and head != stored:
        fields.fail("draft_vocab_size", f"1 to {known}, the teacher's vocabulary")
    return Vocabulary(known, stored, head)


def teacher_ids(file: Path, entries: Mapping[str, Entry], read: Reader, vocabulary: Vocabulary) -> Tensor:
    """int64 [draft], the teacher's id of every draft id: j + d2t[j]; ``d2t`` is an offset.

    Raises:
        CheckpointError: d2t is needed and missing, or is no map into the teacher's vocabulary, or contradicts t2d, the
            teacher's ids that it covers.
    """
    _check_forms(file, entries, {"d2t": vocabulary.head, "t2d": vocabulary.stored})
    whole, order = vocabulary.draft == vocabulary.teacher, torch.arange(vocabulary.draft)
    if "d2t" not in entries and not whole:
        raise CheckpointError(
            f"{file}: d2t is missing; expected I64 [{vocabulary.head}], since the draft vocabulary is smaller than"
            f" the teacher's {vocabulary.teacher}"
        )
    ids = order + read("d2t").long()[: vocabulary.draft] if "d2t" in entries else order
    if whole and not torch.equal(ids, order):
        raise CheckpointError(f"{file}: d2t maps ids where the draft vocabulary is the teacher's; expected zeros")
    _check_ids(file, ids, vocabulary.teacher)
    marked = _marked(file, read("t2d")) if "t2d" in entries else ids
    # Writers that cut nothing leave t2d as it was made: all false.
    if not torch.equal(marked, ids.sort().values) and not (whole and (not len(marked) or len(marked) >= len(ids))):
        raise CheckpointError(f"{file}: t2d marks other ids than j + d2t[j]; expected both to name the same tokens")
    return ids


def _marked(file: Path, t2d: Tensor) -> Tensor:
    if t2d.min() < 0 or t2d.max() > 1:
        raise CheckpointError(f"{file}: t2d runs from {int(t2d.min())} to {int(t2d.max())}; expected 0 and 1 alone")
    return t2d.nonzero().flatten()


def _check_forms(file: Path, entries: Mapping[str, Entry], sizes: Mapping[str, int]) -> None:
    for name in sizes.keys() & entries.keys():
        entry = entries[name]
        if entry.kind not in MAPS[name] or entry.shape != (sizes[name],):
            raise CheckpointError(
                f"{file}: {name} is {entry.kind} {list(entry.shape)}; expected {MAPS[name][0]} [{sizes[name]}]"
            )


def _check_ids(file: Path, ids: Tensor, vocabulary: int) -> None:
    lowest, highest = int(ids.min()), int(ids.max())
    if lowest < 0 or highest >= vocabulary:
        raise CheckpointError(
            f"{file}: j + d2t[j] runs from {lowest} to {highest}; expected ids from 0 to {vocabulary - 1}; d2t must"
            " be an offset from the draft id, not the teacher's id"
        )
    distinct, counts = ids.unique(return_counts=True)
    if len(distinct) != len(ids):
        twice = int(distinct[counts > 1][0])
        raise CheckpointError(
            f"{file}: j + d2t[j] is {twice} more than once; expected each id once; d2t must be an offset from the"
            " draft id"
        )
