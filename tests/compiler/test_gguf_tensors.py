"""Every tensor of a GGUF file is read: another number changes the logits, and none may be missing, more or renamed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from draftwood.compiler.teachers.checkpoint import Checkpoint
from draftwood.errors import CheckpointError
from draftwood.tests.gguf_files import save_gguf, tensors_of

from .test_gguf_models import FAMILIES, decoder_of, logits
from .test_tensor_names import EVERY, chosen

IDS = [5, 9, 17, 3, 22, 41, 8, 60, 2, 33, 12, 7]
Held = dict[str, NDArray[Any]]


@pytest.fixture(params=FAMILIES, scope="module")
def folder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, save_tiny: Callable[..., Path]
) -> Path:
    return save_tiny(tmp_path_factory.mktemp(request.param), **FAMILIES[request.param])


def damaged(held: Held, names: Iterable[str]) -> Iterator[tuple[str, Held]]:
    """Each of these tensors left out, renamed, doubled under another name, and of another shape."""
    for name in names:
        value = held[name]
        rest = {other: array for other, array in held.items() if other != name}
        if name != "output.weight":  # without it the embedding is the output matrix
            yield ("bias" if name.endswith("bias") else name), rest  # a family without biases names those that are left
        yield name, rest | {f"{name}_": value}
        yield f"{name}_", held | {f"{name}_": value}
        yield name, rest | {name: np.concatenate([value, value], -1)}


def one_line(path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match=rf"^.*{re.escape(name)}.*$") as refused:
        Checkpoint.open(path)
    assert "\n" not in str(refused.value)


@EVERY
def test_no_tensor_is_missing_more_or_renamed(folder: Path, tmp_path: Path, every: bool) -> None:
    path, whole = tmp_path / "model.gguf", tensors_of(folder)
    for name, held in damaged(whole, chosen(whole, every)):
        save_gguf(folder, path, held=held)
        one_line(path, name)


def test_no_name_stands_twice(folder: Path, tmp_path: Path) -> None:
    """The package writes no such file: a name of as many letters is put over another in the bytes."""
    path, names = tmp_path / "model.gguf", [*tensors_of(folder)]
    save_gguf(folder, path)
    whole, pairs = path.read_bytes(), [(a, b) for a in names for b in names if a < b and len(a) == len(b)]
    assert len(pairs) > 5
    for name, other in pairs:
        assert whole.count(other.encode()) == 1
        path.write_bytes(whole.replace(other.encode(), name.encode()))
        one_line(path, name)


def test_a_file_without_output_matrix_has_the_embedding_twice(folder: Path, tmp_path: Path) -> None:
    path, held = tmp_path / "model.gguf", tensors_of(folder)
    save_gguf(folder, path, held=held | {"output.weight": held["token_embd.weight"]})
    want_RV = logits(decoder_of(Checkpoint.open(path), len(IDS)), IDS)
    del held["output.weight"]
    save_gguf(folder, path, held=held)
    assert torch.equal(logits(decoder_of(Checkpoint.open(path), len(IDS)), IDS), want_RV)


@EVERY
def test_every_tensor_changes_the_logits(folder: Path, tmp_path: Path, every: bool) -> None:
    path, held, unread = tmp_path / "model.gguf", tensors_of(folder), []
    save_gguf(folder, path)
    before = logits(decoder_of(Checkpoint.open(path), len(IDS)), IDS)
    for name in chosen(held, every):
        noise = 0.3 * np.random.default_rng(0).standard_normal(held[name].shape)
        save_gguf(folder, path, held=held | {name: (held[name] + noise).astype(np.float32)})
        if torch.equal(logits(decoder_of(Checkpoint.open(path), len(IDS)), IDS), before):
            unread.append(name)
    assert unread == []
