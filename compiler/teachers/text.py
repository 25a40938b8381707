"""The tokenizer of a teacher, from a checkpoint of any format."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from draftwood.compiler.checkpoints.gguf_header import read_header
from draftwood.compiler.teachers.folder import tokenizer_files
from draftwood.compiler.teachers.gguf import gguf_files
from draftwood.compiler.teachers.gguf_tokenizer import write_tokenizer as write_gguf_tokenizer
from draftwood.compiler.teachers.sentencepiece import FILE as SENTENCEPIECE
from draftwood.compiler.teachers.sentencepiece import write_sentencepiece
from draftwood.errors import CheckpointError


def write_tokenizer(model: Path, folder: Path) -> bool:
    """Writes the files of a model's tokenizer into a folder that is there; False if the model has none.

    Raises:
        CheckpointError: a GGUF file or SentencePiece model has no form here, or a file cannot be read.
    """
    if files := gguf_files(model):
        return write_gguf_tokenizer(read_header(files[0]), folder)
    if not has_tokenizer(model):
        return False
    for path in tokenizer_files(model):
        try:
            shutil.copyfile(path, folder / path.name)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror}); fetch the file again") from None
    if not (folder / "tokenizer.json").is_file():
        write_sentencepiece(model, folder)
    return True


def has_tokenizer(model: Path) -> bool:
    """Whether a model has a tokenizer, which may still be one that has no form here."""
    if files := gguf_files(model):
        return read_header(files[0]).fields.get("tokenizer.ggml.model", "none") != "none"
    return any((model / name).is_file() for name in ("tokenizer.json", SENTENCEPIECE))


def check_tokenizer(model: Path) -> None:
    """Raises what ``write_tokenizer`` would raise, long before it is needed."""
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(model, Path(folder))
