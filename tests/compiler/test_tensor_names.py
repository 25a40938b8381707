"""Every tensor of a checkpoint is read: another number changes the logits, and none may be missing, more or renamed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftwood.compiler.teachers.checkpoint import Checkpoint
from draftwood.compiler.teachers.decoder import Decoder
from draftwood.errors import CheckpointError

from .test_config_keys import FAMILIES, ours

EXPERT = re.compile(r"\.experts\.\d+\.")
# Of tensors whose names differ in numbers alone the usual run changes the last.
EVERY = pytest.mark.parametrize(
    "every", [pytest.param(False, id="one of a kind"), pytest.param(True, id="every", marks=pytest.mark.slow)]
)


def chosen(names: Iterable[str], every: bool) -> list[str]:
    kinds = {name if every else re.sub(r"\d+", "N", name): name for name in names}
    return [*kinds.values()]


@pytest.fixture(params=FAMILIES, scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, save_llama: Callable) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    save_llama(folder, family=request.param, **FAMILIES[request.param])
    return folder


def damaged(held: dict[str, Tensor], names: Iterable[str]) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Each of these tensors left out, renamed, doubled under another name, and of another shape."""
    for name in names:
        value = held[name]
        rest = {other: one for other, one in held.items() if other != name}
        yield name, rest
        yield name, rest | {f"{name}_": value}
        yield f"{name}_", held | {f"{name}_": value.clone()}
        yield name, rest | {name: torch.cat([value, value])}


@EVERY
def test_no_tensor_is_missing_more_or_renamed(folder: Path, every: bool) -> None:
    path = folder / "model.safetensors"
    held = load_file(path)
    try:
        for name, tensors in damaged(held, chosen(held, every)):
            save_file(tensors, path, {"format": "pt"})
            with pytest.raises(CheckpointError, match=rf"^.*{re.escape(name)}.*$") as refused:
                Checkpoint.open(folder)
            assert "\n" not in str(refused.value)
    finally:
        save_file(held, path, {"format": "pt"})


@EVERY
def test_every_tensor_changes_the_logits(folder: Path, load_decoder: Callable[..., Decoder], every: bool) -> None:
    """Of experts at least one of a kind in each layer: not every one is chosen for so short a text."""
    path = folder / "model.safetensors"
    held = load_file(path)
    before, changes = ours(load_decoder(folder, 128)), dict[str, bool]()
    try:
        # Which expert a text needs is not known.
        names = [*chosen((name for name in held if not EXPERT.search(name)), every), *filter(EXPERT.search, held)]
        for name in names:
            value = held[name]
            other: Any = value + torch.randn(value.shape, generator=torch.Generator().manual_seed(0)) * 0.3
            save_file(held | {name: other.to(value.dtype)}, path, {"format": "pt"})
            kind = EXPERT.sub(".experts.", name)
            changes[kind] = changes.get(kind, False) or not torch.equal(ours(load_decoder(folder, 128)), before)
    finally:
        save_file(held, path, {"format": "pt"})
    assert [name for name, changed in changes.items() if not changed] == []
