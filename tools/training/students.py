"""Students of every registered kind: begun for training, and read back from their files."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from draftwood.compiler.drafters.registry import kind_named, kind_of
from draftwood.compiler.training.student import Student
from draftwood.compiler.training.teacher import FrozenTeacher
from draftwood.errors import CheckpointError, RequestError

# V draft vocabulary


def begin(kind: str, options: dict[str, Any], teacher: FrozenTeacher, ids_V: Tensor | None) -> Student:
    """A student that starts from the teacher's weights, on the teacher's device; options are complete."""
    student = kind_named(kind).model.student(teacher, options, ids_V)
    student.to(teacher.device).start_from(teacher)
    return student


class Start(NamedTuple):
    """A trained drafter to go on from: its tensors, and the ids that it may propose, int64 [V] (None for all)."""

    tensors: dict[str, Tensor]
    ids_V: Tensor | None

    @classmethod
    def read(cls, folder: Path, kind: str, teacher: FrozenTeacher, levels: int) -> Start:
        """The drafter of a folder.

        Raises:
            RequestError: it is of another kind.
        """
        stored = kind_of(folder)
        if stored.name != kind:
            raise RequestError(f"--start {folder}: holds {stored.title}; expected {kind_named(kind).title}")
        student, tensors = stored.model.trained(folder, teacher, levels)
        return cls(tensors, student.ids_V)

    @property
    def digest(self) -> int:
        """A number of the tensors."""
        return zlib.crc32(b"".join(self.tensors[name].float().numpy().tobytes() for name in sorted(self.tensors)))


def load(folder: Path, teacher: FrozenTeacher, levels: int | None = None) -> Student:
    """A trained drafter, frozen. ``levels`` is how far it drafts if nothing in it says so, as with EAGLE-3.

    Raises:
        CheckpointError: the folder holds no drafter of this teacher.
    """
    student, tensors = kind_of(folder).model.trained(folder, teacher, levels)
    try:
        student.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(f"{folder}: not a drafter of this teacher ({reason}); train one for it") from None
    return student.to(teacher.device).requires_grad_(False).eval()
