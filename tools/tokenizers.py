"""A model's own tokenizer, for tools that read texts with it before there is a bundle."""

from __future__ import annotations

import tempfile
from pathlib import Path

from draftwood.compiler.teachers.formats import write_tokenizer
from draftwood.errors import RequestError
from draftwood.runtime.text.tokenizer import Tokenizer


def tokenizer_of(model: Path) -> Tokenizer:
    """The tokenizer of a checkpoint.

    Raises:
        RequestError: it has none.
        CheckpointError: it has one that there is no form of here.
        BundleError: its files are broken.
    """
    with tempfile.TemporaryDirectory() as folder:
        if not write_tokenizer(model, Path(folder)):
            raise RequestError(
                f"{model}: has no tokenizer; expected tokenizer.json or tokenizer.model, or a GGUF file with its tokens"
            )
        return Tokenizer.load(Path(folder))
