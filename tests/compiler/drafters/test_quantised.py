"""A drafter in W8A8: every kind's layers come back as the whole numbers that were written, and the text stays."""

import json
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
from draftwood.compiler.quantisation.drafter import quantise_drafter
from draftwood.compiler.targets.modules import make_modules
from draftwood.compiler.teachers.checkpoint import Checkpoint
from draftwood.compiler.teachers.linear import QuantisedLinear
from draftwood.errors import CheckpointError, RequestError
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.decoding import Decoding, Options
from draftwood.runtime.engines.cpu import CpuEngine
from draftwood.runtime.policy import policy_for
from draftwood.tools import cli, demo
from draftwood.tools.comparison.check import check
from draftwood.trees import Topology

# Of the drafters here; what reads raw states is left alone, and an output matrix that is the teacher's is one of them.
LAYERS = {"medusa": 2, "eagle3": 5, "fasteagle": 13}
# The shipped ones, whose draft vocabulary is the teacher's.
SHIPPED = {"demo-medusa": 8, "demo-eagle3": 5, "demo-fasteagle": 21, "demo-dspark": 10}


BLOCK = ("qkv", "o", "gate_up", "down")
KEY = "midlayer.mlp.up_proj.weight_scale"


@pytest.fixture
def sources(tiny_heads: Path, tiny_drafters: dict[str, Path]) -> dict[str, Path]:
    return {"medusa": tiny_heads, **tiny_drafters}


def silent(stage: str) -> None:
    pass


@pytest.mark.parametrize("kind", LAYERS)
def test_whole_numbers_come_back(kind: str, sources: dict[str, Path], tiny_teacher: Path, tmp_path: Path) -> None:
    teacher = Checkpoint.open(tiny_teacher)
    plain, made = open_drafter(sources[kind], teacher), quantise_drafter(sources[kind], teacher, tmp_path / "q", silent)
    assert len(made.model.quantised) == LAYERS[kind] and not plain.model.quantised
    for layer in made.model.quantised:
        whole_OH, scale_O1 = rounded(plain.checkpoint.weight(f"{layer}.weight"))
        assert torch.equal(made.checkpoint.weight(f"{layer}.weight"), whole_OH.t()), layer
        assert torch.equal(made.checkpoint.weight(f"{layer}.weight_scale"), scale_O1.flatten()), layer
    _, network = make_modules(teacher.config, made.model, 128)
    assert network is not None
    assert sum(isinstance(module, QuantisedLinear) for module in network.modules()) == LAYERS[kind]
    assert {name for name in network.state_dict() if "draft_cos" not in name} >= set(made.checkpoint.names())


@pytest.mark.parametrize("name", [*LAYERS, *SHIPPED])
def test_rounded_as_it_is_read_it_is_what_is_written(
    name: str, sources: dict[str, Path], tiny_teacher: Path, tmp_path: Path
) -> None:
    teacher = Checkpoint.open(demo.resolve("demo") if name in SHIPPED else tiny_teacher)
    path = demo.resolve(name) if name in SHIPPED else sources[name]
    read, written = (
        in_int8(open_drafter(path, teacher), path, teacher.config),
        quantise_drafter(path, teacher, tmp_path / "q", silent),
    )
    assert len(read.model.quantised) == (LAYERS | SHIPPED)[name]
    assert set(read.model.quantised) == set(written.model.quantised) and read.digest() != written.digest()
    assert set(read.checkpoint.names()) == set(written.checkpoint.names())
    assert set(read.checkpoint.names()) >= {f"{layer}.weight_scale" for layer in read.model.quantised}
    for parameter in read.checkpoint.names():
        assert torch.equal(read.checkpoint.weight(parameter), written.checkpoint.weight(parameter)), parameter
    with pytest.raises(RequestError, match="is quantised already; name the original"):
        in_int8(written, tmp_path / "q", teacher.config)


def test_an_output_matrix_that_is_in_int8_anyway_is_shared(
    sources: dict[str, Path], tiny_teacher: Path, quantised_teacher: Path
) -> None:
    plain, whole = (Checkpoint.open(path) for path in (tiny_teacher, quantised_teacher))
    subset = open_drafter(sources["eagle3"], plain)
    config = subset.model.config
    every = replace(subset, model=replace(subset.model, config=replace(config, draft_vocabulary=300)))
    assert borrows_head(subset, plain.config) and borrows_head(subset, whole.config)
    assert borrows_head(every, plain.config) and not borrows_head(every, whole.config)


def test_what_an_older_version_wrote_is_read(sources: dict[str, Path], tiny_teacher: Path, tmp_path: Path) -> None:
    teacher, folder = Checkpoint.open(tiny_teacher), tmp_path / "q"
    quantise_drafter(sources["eagle3"], teacher, folder, silent)
    tensors = load_file(folder / "model.safetensors")
    whole_OH, scale_O1 = rounded(tensors["fc.weight"])
    tensors |= {"fc.weight": whole_OH, "fc.weight_scale": scale_O1}
    del tensors["lm_head.weight"], tensors["lm_head.weight_scale"]
    save_file(tensors, folder / "model.safetensors")
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"fc"', ""))
    assert set(open_drafter(folder, teacher).model.quantised) == {"fc", *(f"block.{of}" for of in BLOCK)}


SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("eagle3", "fasteagle")]


@pytest.mark.parametrize("kind", ["medusa", *SLOW])
def test_text_is_that_of_the_teacher(kind: str, sources: dict[str, Path], tiny_teacher: Path, tmp_path: Path) -> None:
    made = tmp_path / "q"
    quantise_drafter(sources[kind], Checkpoint.open(tiny_teacher), made, silent)
    trees = (("plain", Topology.plain()), ("chain", Topology.chain(2)))
    build(BuildRequest(model=tiny_teacher, drafter=made, trees=trees, slots=(128,)), tmp_path / "bundle")
    bundle = Bundle.open(tmp_path / "bundle")
    stored = map_tensors(bundle.folder / "onnx/weights.safetensors")
    layers = open_drafter(made, Checkpoint.open(tiny_teacher)).model.quantised
    assert {stored[f"{layer}.weight"].dtype for layer in layers} == {torch.int8}
    assert bundle.manifest.int8 and not bundle.manifest.quantised
    report = check(bundle, [np.arange(20, dtype=np.int64)])
    assert report["ok"] and (report["tolerances"]["cpu"], report["draft_tolerances"]["cpu"]) == (1e-4, 5e-2)
    engine, options = CpuEngine(bundle), Options(max_new_tokens=40, ignore_eos=True)
    texts = [
        Decoding(engine, [3, 5, 7], options, policy_for(bundle, gear)).run().token_ids for gear in (None, "chain-kv128")
    ]
    assert texts[0] == texts[1]


def test_the_command_says_what_it_made(
    sources: dict[str, Path], tiny_teacher: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--model", str(tiny_teacher), "--drafter", str(sources["eagle3"]), "--out", str(tmp_path / "q")]
    assert cli.main(["quantize", *given, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["drafter"], said["quantised"]) == ("eagle3", LAYERS["eagle3"])
    assert cli.main(["inspect", str(tmp_path / "q"), "--model", str(tiny_teacher)]) == 0
    assert f"W8A8, {LAYERS['eagle3']} linear layers" in capsys.readouterr().out
    assert cli.main(["quantize", *given[:4], "--out", str(tmp_path / "r"), "--head"]) == 2
    assert "--head: is for teachers" in capsys.readouterr().err


def test_what_is_quantised_is_not_quantised_again(sources: dict[str, Path], tiny_teacher: Path, tmp_path: Path) -> None:
    teacher = Checkpoint.open(tiny_teacher)
    quantise_drafter(sources["medusa"], teacher, tmp_path / "q", silent)
    with pytest.raises(RequestError, match="is quantised already; name the original"):
        quantise_drafter(tmp_path / "q", teacher, tmp_path / "r", silent)


@pytest.mark.parametrize("damage", ["no scale", "another type", "not described"])
def test_int8_without_its_scales_or_description_is_refused(
    damage: str, sources: dict[str, Path], tiny_teacher: Path, tmp_path: Path
) -> None:
    teacher, folder = Checkpoint.open(tiny_teacher), tmp_path / "q"
    quantise_drafter(sources["eagle3"], teacher, folder, silent)
    tensors, config = load_file(folder / "model.safetensors"), folder / "config.json"
    shutil.copy(config, tmp_path)
    if damage == "no scale":
        save_file({k: v for k, v in tensors.items() if k != KEY}, folder / "model.safetensors")
    elif damage == "another type":
        save_file(tensors | {KEY: tensors[KEY].half()}, folder / "model.safetensors")
    else:
        fields = json.loads(config.read_text())
        del fields["quantization_config"]
        config.write_text(json.dumps(fields))
    with pytest.raises(CheckpointError) as caught:
        open_drafter(folder, teacher)
    assert "\n" not in str(caught.value) and "model.safetensors" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"drafter": None}, "--int8-drafter: there is no --drafter; name one"),
        (
            {"weights": "none", "targets": ("ge",)},
            "--int8-drafter: rounds the drafter's weights; expected --weights copy",
        ),
        ({"drafter": "quantised"}, "is quantised already; name the original"),
    ],
)
def test_what_cannot_be_rounded_is_refused_before_anything_is_written(
    changes: dict, line: str, sources: dict[str, Path], tiny_teacher: Path, tmp_path: Path
) -> None:
    plain = (("plain", Topology.plain()),)
    if changes.get("drafter"):
        quantise_drafter(sources["medusa"], Checkpoint.open(tiny_teacher), tmp_path / "q", silent)
        changes = {"drafter": tmp_path / "q"}
    asked = {"model": tiny_teacher, "drafter": sources["medusa"], "trees": plain, "slots": (128,), **changes}
    with pytest.raises(RequestError, match=line):
        build(BuildRequest(**asked, int8_drafter=True), tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()
