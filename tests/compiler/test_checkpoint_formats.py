"""A checkpoint's format is one class and one registration: NumPy archives, added here and nowhere else, are built."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from draftwood.compiler.bundle.build import build
from draftwood.compiler.bundle.request import BuildRequest
from draftwood.compiler.checkpoints.fields import Fields
from draftwood.compiler.checkpoints.packed import Grouped
from draftwood.compiler.checkpoints.safetensors_file import Entry
from draftwood.compiler.checkpoints.weight import WeightParts
from draftwood.compiler.teachers import formats
from draftwood.compiler.teachers.config import TeacherConfig
from draftwood.compiler.teachers.reader import WholeMatrix
from draftwood.compiler.teachers.registry import config_of, family_of
from draftwood.manifest import UsualSampling
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.engines.cpu import CpuEngine
from draftwood.tests.decoded import decoded
from draftwood.tools.cli import main
from draftwood.tools.commands import inspect
from draftwood.trees import Topology


@dataclass(frozen=True)
class Archive:
    """A `draftwood.compiler.teachers.reader.Reader` of NAME.npz: tensors, and texts of one element."""

    path: Path
    config: TeacherConfig
    parts: Mapping[str, WeightParts]
    entries: Mapping[str, Entry]
    packed: Mapping[str, WholeMatrix] = field(default_factory=dict)
    linkable: Mapping[str, Entry] = field(default_factory=dict)

    @classmethod
    def reads(cls, path: Path) -> bool:
        return path.suffix == ".npz"

    @classmethod
    def open(cls, path: Path) -> Archive:
        archive = np.load(path)
        config = config_of(Fields(path, json.loads(str(archive["config.json"]))))
        entries = {name: Entry(path, archive[name].shape, "F32") for name in archive if not name.endswith(".json")}
        return cls(path, config, family_of(config).parts(config), entries)

    @classmethod
    def usual_sampling(cls, path: Path) -> UsualSampling:
        return UsualSampling(temperature=0.5)

    @classmethod
    def describe(cls, path: Path) -> Archive:
        return cls.open(path)

    @classmethod
    def has_tokenizer(cls, path: Path) -> bool:
        return "tokenizer.json" in np.load(path)

    @classmethod
    def write_tokenizer(cls, path: Path, folder: Path) -> bool:
        (folder / "tokenizer.json").write_text(str(np.load(path)["tokenizer.json"]))
        return True

    def tensor(self, name: str) -> Tensor:
        return torch.from_numpy(np.load(self.path)[name])

    def grouped(self, name: str) -> Grouped:
        raise KeyError(name)

    def digest(self) -> str:
        return hashlib.sha256(self.path.read_bytes()).hexdigest()

    def description(self) -> dict[str, Any]:
        return dict(json.loads(str(np.load(self.path)["config.json"])))

    def copy_texts(self, folder: Path) -> None:
        self.write_tokenizer(self.path, folder)


@pytest.fixture
def archive(tiny_teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tiny teacher in one archive, and its format registered."""
    monkeypatch.setattr(formats, "FORMATS", [Archive, *formats.FORMATS])
    monkeypatch.setattr(inspect, "TENSOR_FILES", (*inspect.TENSOR_FILES, ".npz"))
    path = tmp_path / "teacher.npz"
    texts = {name: np.array((tiny_teacher / name).read_text()) for name in ("config.json", "tokenizer.json")}
    np.savez(
        path,
        **{name: tensor.numpy() for name, tensor in load_file(tiny_teacher / "model.safetensors").items()},
        **texts,
    )
    return path


def test_an_archive_is_built_and_decodes_as_the_folder(archive: Path, tiny_bundle: Path, tmp_path: Path) -> None:
    folder, trees = tmp_path / "bundle", (("plain", Topology.plain()),)
    build(BuildRequest(model=archive, drafter=None, trees=trees, slots=(128,), prefill_rows=()), folder)
    assert (folder / "tokenizer" / "tokenizer.json").is_file()
    texts = []
    for bundle, temperature in ((Bundle.open(folder), 0.5), (Bundle.open(tiny_bundle), None)):
        assert bundle.manifest.teacher.sampling == UsualSampling(temperature=temperature)
        texts.append(decoded(CpuEngine(bundle), [5, 17, 3], None, max_new_tokens=24).token_ids)
    assert texts[0] == texts[1] and len(texts[0]) == 24


def test_an_archive_is_inspected(archive: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(archive), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["kind"] == "teacher" and figures["weights"]["files"] == 1
