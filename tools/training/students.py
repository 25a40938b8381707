"""Students of every registered kind: begun for training, and read back from their files."""

from __future__ import annotations

import zlib
from dataclasses import asdict
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
    """A trained drafter to go on from: a student as large, and its tensors."""

    folder: Path
    student: Student
    tensors: dict[str, Tensor]

    @classmethod
    def read(cls, folder: Path, kind: str, teacher: FrozenTeacher, levels: int | None = None) -> Start:
        """The drafter of a folder; ``levels`` as for ``load``.

        Raises:
            RequestError: it is of another kind.
        """
        stored = kind_of(folder)
        if stored.name != kind:
            raise RequestError(f"--start {folder}: holds {stored.title}; expected {kind_named(kind).title}")
        return cls(folder, *stored.model.trained(folder, teacher, levels))

    @property
    def digest(self) -> int:
        """A number of the tensors and of the draft vocabulary."""
        held = [self.tensors[name].float() for name in sorted(self.tensors)]
        if self.student.ids_V is not None:
            held.append(self.student.ids_V)
        return zlib.crc32(b"".join(tensor.cpu().numpy().tobytes() for tensor in held))

    def give(self, student: Student) -> None:
        """Sets a student's parameters to the drafter's. Those of levels and layers that it lacks stay as they began.

        Raises:
            RequestError: something of the drafter has no place in the student, or reads something else there.
        """
        stored, there = _facts(self.student), _facts(student)
        cut = student.levels < self.student.levels
        stored |= {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}
        there |= {name: tuple(parameter.shape) for name, parameter in student.named_parameters()}
        for name, fact in stored.items():
            if there.get(name) != fact and not (cut and name not in there):
                raise RequestError(
                    f"--start {self.folder}: {name} is {fact}; expected {there.get(name, 'none')}, as a training with"
                    " these options has it: leave out those that set sizes, or begin without --start"
                )
        student.take(self.tensors)


def _facts(student: Student) -> dict[str, Any]:
    """All that fixes a student's computation but its parameters and its levels."""
    sizes = getattr(student, "sizes", None)
    facts = {"aux_layer_ids": student.aux, "mask_token_id": getattr(student, "mask_token", None)}
    return facts if sizes is None else {**facts, **asdict(sizes)}


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
