"""Students of every registered kind: begun for training, and read back from their files."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

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


def go_on(student: Student, kind: str, folder: Path, teacher: FrozenTeacher) -> int:
    """Lets a student begin where the drafter of a folder stands; a number of the folder's tensors.

    Raises:
        RequestError: the folder holds a drafter of another kind.
    """
    stored = kind_of(folder)
    if stored.name != kind:
        raise RequestError(f"--start {folder}: holds {stored.title}; expected {kind_named(kind).title}")
    tensors = stored.model.trained(folder, teacher, student.levels)[1]
    student.take(tensors)
    return zlib.crc32(b"".join(tensors[name].float().numpy().tobytes() for name in sorted(tensors)))


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
