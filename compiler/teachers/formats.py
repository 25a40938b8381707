"""The formats of teachers' files, each a `draftwood.compiler.teachers.reader.Reader`."""

from __future__ import annotations

from pathlib import Path

from draftwood.compiler.teachers.folder import TeacherFolder
from draftwood.compiler.teachers.gguf import Gguf
from draftwood.compiler.teachers.reader import Reader
from draftwood.manifest import UsualSampling

# The first that reads a path is asked; a folder of Hugging Face reads every path.
FORMATS: list[type[Reader]] = [Gguf, TeacherFolder]


def format_of(path: Path) -> type[Reader]:
    """The format of the teacher that a path names."""
    return next(form for form in FORMATS if form.reads(path))


def has_tokenizer(model: Path) -> bool:
    """Whether a model has a tokenizer, which may still be one that has no form here."""
    return format_of(model).has_tokenizer(model)


def write_tokenizer(model: Path, folder: Path) -> bool:
    """Writes the files of a model's tokenizer into a folder that is there; False if the model has none.

    Raises:
        CheckpointError: the tokenizer has no form here, or a file cannot be read.
    """
    return format_of(model).write_tokenizer(model, folder)


def usual_sampling(model: Path) -> UsualSampling:
    """How a model's authors sample from it; nothing if they do not say.

    Raises:
        CheckpointError: a value is outside its range.
    """
    return format_of(model).usual_sampling(model)
