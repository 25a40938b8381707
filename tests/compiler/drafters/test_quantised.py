"""A drafter in W8A8: every kind's layers are rounded as they are read, and the text stays."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from draftwood.compiler.bundle.build import build
from draftwood.compiler.bundle.request import BuildRequest
from draftwood.compiler.checkpoints.int8 import rounded
from draftwood.compiler.checkpoints.safetensors_file import map_tensors
from draftwood.compiler.drafters.int8 import borrows_head, in_int8
from draftwood.compiler.drafters.registry import open_drafter
from draftwood.compiler.targets.modules import make_modules
from draftwood.compiler.teachers.checkpoint import Checkpoint
from draftwood.compiler.teachers.linear import QuantisedLinear
from draftwood.errors import CheckpointError, RequestError
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.decoding import Decoding
from draftwood.runtime.engines.cpu import CpuEngine
from draftwood.runtime.options import Options
from draftwood.runtime.policy import FixedTree
from draftwood.tests import fixtures
from draftwood.tools.comparison.check import check
from draftwood.trees import Topology

# Of the drafters here; what reads raw states is left alone, and an output matrix that is the teacher's is one of them.
LAYERS = {"medusa": 2, "eagle3": 5, "fasteagle": 13}
# Trained ones, whose draft vocabulary is the teacher's.
TRAINED = {"medusa": 8, "eagle3": 5, "fasteagle": 21, "dspark": 10}


@pytest.fixture
def sources(tiny_heads: Path, tiny_drafters: dict[str, Path]) -> dict[str, Path]:
    return {"medusa": tiny_heads, **tiny_drafters}


@pytest.mark.parametrize("name", [*LAYERS, *(f"trained {name}" for name in TRAINED)])
def test_layers_are_rounded_as_they_are_read(name: str, sources: dict[str, Path], tiny_teacher: Path) -> None:
    trained = name.removeprefix("trained ") if name.startswith("trained ") else None
    teacher = Checkpoint.open(fixtures.TEACHER if trained else tiny_teacher)
    plain = open_drafter(fixtures.FOLDER / trained if trained else sources[name], teacher)
    made = in_int8(plain, teacher.config)
    assert len(made.model.quantised) == (TRAINED[trained] if trained else LAYERS[name]) and not plain.model.quantised
    assert made.digest() != plain.digest()
    for layer in made.model.quantised:
        whole_OH, scale_O1 = rounded(plain.checkpoint.weight(f"{layer}.weight"))
        assert torch.equal(made.checkpoint.weight(f"{layer}.weight"), whole_OH.t()), layer
        assert torch.equal(made.checkpoint.weight(f"{layer}.weight_scale"), scale_O1.flatten()), layer
    _, network = make_modules(teacher.config, made.model, 128)
    assert network is not None
    assert sum(isinstance(module, QuantisedLinear) for module in network.modules()) == len(made.model.quantised)
    assert {name for name in network.state_dict() if "draft_cos" not in name} >= set(made.checkpoint.names())


def test_an_output_matrix_that_is_in_int8_anyway_is_shared(
    sources: dict[str, Path], tiny_teacher: Path, quantised_teacher: Path
) -> None:
    plain, whole = (Checkpoint.open(path) for path in (tiny_teacher, quantised_teacher))
    subset = open_drafter(sources["eagle3"], plain)
    config = subset.model.config
    every = replace(subset, model=replace(subset.model, config=replace(config, draft_vocabulary=300)))
    assert borrows_head(subset, plain.config) and borrows_head(subset, whole.config)
    assert borrows_head(every, plain.config) and not borrows_head(every, whole.config)


SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("eagle3", "fasteagle")]


@pytest.mark.parametrize("kind", ["medusa", *SLOW])
def test_text_is_that_of_the_teacher(kind: str, sources: dict[str, Path], tiny_teacher: Path, tmp_path: Path) -> None:
    trees = (("plain", Topology.plain()), ("chain", Topology.chain(2)))
    asked = BuildRequest(model=tiny_teacher, drafter=sources[kind], trees=trees, slots=(128,), int8_drafter=True)
    build(asked, tmp_path / "bundle")
    bundle = Bundle.open(tmp_path / "bundle")
    stored = map_tensors(bundle.folder / "onnx/weights.safetensors")
    teacher = Checkpoint.open(tiny_teacher)
    layers = in_int8(open_drafter(sources[kind], teacher), teacher.config).model.quantised
    assert {stored[f"{layer}.weight"].dtype for layer in layers} == {torch.int8}
    assert bundle.manifest.int8 and not bundle.manifest.quantised
    report = check(bundle, [np.arange(20, dtype=np.int64)])
    # The teacher's is measured, in fp32.
    assert report["ok"] and report["tolerances"]["cpu"]["logits"] < 1e-4 and report["draft_tolerances"]["cpu"] == 5e-2
    engine, options = CpuEngine(bundle), Options(max_new_tokens=40, ignore_eos=True)
    texts = [
        Decoding(engine, [3, 5, 7], options, FixedTree(bundle, gear)).run().token_ids for gear in (None, "chain-kv128")
    ]
    assert texts[0] == texts[1]


def test_a_folder_in_int8_is_refused(sources: dict[str, Path], tiny_teacher: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(sources["eagle3"], tmp_path / "q")
    tensors = load_file(folder / "model.safetensors")
    key = "midlayer.mlp.up_proj.weight"
    save_file(tensors | {key: rounded(tensors[key])[0]}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"has dtype I8; expected one of .* take the original one"):
        open_drafter(folder, Checkpoint.open(tiny_teacher))


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"drafter": None}, "--int8-drafter: there is no --drafter; name one"),
        (
            {"weights": "none", "targets": ("ge",)},
            "--int8-drafter: rounds the drafter's weights; expected --weights copy",
        ),
    ],
)
def test_what_cannot_be_rounded_is_refused_before_anything_is_written(
    changes: dict, line: str, sources: dict[str, Path], tiny_teacher: Path, tmp_path: Path
) -> None:
    plain = (("plain", Topology.plain()),)
    asked = {"model": tiny_teacher, "drafter": sources["medusa"], "trees": plain, "slots": (128,), **changes}
    with pytest.raises(RequestError, match=line):
        build(BuildRequest(**asked, int8_drafter=True), tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()
