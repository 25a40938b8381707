"""A model's own tokenizer, for tools that read texts with it before there is a bundle."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from draftwood.compiler.checkpoints.safetensors_file import sha256_of
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
    with _files(model) as folder:
        return Tokenizer.load(folder)


def read_tokenizer(model: Path) -> tuple[Tokenizer, str]:
    """The tokenizer of a checkpoint, and SHA-256, in hex, over its files; raises as ``tokenizer_of``."""
    with _files(model) as folder:
        return Tokenizer.load(folder), sha256_of(sorted(folder.iterdir()))


@contextmanager
def _files(model: Path) -> Iterator[Path]:
    """A folder with the tokenizer's files as a bundle has them."""
    with tempfile.TemporaryDirectory() as folder:
        if not write_tokenizer(model, Path(folder)):
            raise RequestError(
                f"{model}: has no tokenizer; expected tokenizer.json or tokenizer.model, or a GGUF file with its tokens"
            )
        yield Path(folder)
