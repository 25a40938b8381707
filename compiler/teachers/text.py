"""The tokenizer of a teacher, from a checkpoint of any format."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path

from draftwood.compiler.checkpoints.fields import IgnoredField
from draftwood.compiler.checkpoints.gguf_header import read_header
from draftwood.compiler.teachers.folder import tokenizer_files
from draftwood.compiler.teachers.gguf import gguf_files
from draftwood.compiler.teachers.gguf_tokenizer import write_tokenizer as write_gguf_tokenizer

SENTENCEPIECE = "tokenizer.model"


def write_tokenizer(model: Path, folder: Path) -> bool:
    """Writes the files of a model's tokenizer into a folder that is there; False if the model has none.

    Raises:
        CheckpointError: a GGUF file's tokenizer has no form here.
    """
    if files := gguf_files(model):
        return write_gguf_tokenizer(read_header(files[0]), folder)
    if not has_tokenizer(model):
        return False
    for path in tokenizer_files(model):
        shutil.copyfile(path, folder / path.name)
    return True


def has_tokenizer(model: Path) -> bool:
    """Whether a model has a tokenizer that is read here; warns if its only one has another form."""
    if files := gguf_files(model):
        return read_header(files[0]).fields.get("tokenizer.ggml.model", "none") != "none"
    readable = any(path.name == "tokenizer.json" for path in tokenizer_files(model))
    if not readable and (other := model / SENTENCEPIECE).is_file():
        code = f"A.from_pretrained({str(model)!r}).save_pretrained({str(model)!r})"
        warnings.warn(
            f"{other}: SentencePiece's form alone, which is not read, so prompts are token ids; if sentencepiece is"
            f" installed transformers writes tokenizer.json: from transformers import AutoTokenizer as A; {code}",
            IgnoredField,
            stacklevel=2,
        )
    return readable
