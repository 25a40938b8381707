"""Bundles with NPU graphs: their content, with weights, without, and with weights bound later."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from draftwood.compiler.bundle.binding import bind
from draftwood.compiler.bundle.build import build
from draftwood.compiler.bundle.request import BuildRequest
from draftwood.compiler.ge.atc import atc_command, atc_script
from draftwood.compiler.ge.weights import map_npu_weights, plan_weights, read_index
from draftwood.errors import BundleError, CheckpointError, RequestError
from draftwood.manifest import Manifest, encode, read_manifest
from draftwood.runtime.bundle import Bundle

TEACHER = Path(__file__).parents[2] / "fixtures" / "teacher"
# In the name of a graph for several texts.
SEVERAL = re.compile(r"-b\d")


@pytest.fixture(scope="module")
def request_(pangu_request: BuildRequest) -> BuildRequest:
    """What is built for one text at a time: all but the graphs that ``SEVERAL`` names."""
    return replace(pangu_request, texts=1)


@pytest.fixture(scope="module")
def copied(pangu_bundle: Path) -> tuple[Path, Manifest]:
    return pangu_bundle, read_manifest(pangu_bundle)


def files(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_a_bundle_for_the_npu_alone(copied: tuple[Path, Manifest]) -> None:
    folder, manifest = copied
    npu = manifest.graph_set("ge")
    assert npu is not None and manifest.graph_sets == (npu,)
    assert [graph.name for graph in npu.graphs if not SEVERAL.search(graph.name)] == [
        "prefill-t8-kv128",
        "decode-kv128",
        "verify-t5-kv128",
        *(f"accept-{draws}-t{rows}" for rows in (2, 5) for draws in ("greedy", "sampled")),
        "draft",
    ]
    assert {graph.kind: graph.rows for graph in npu.graphs}["decode"] == 2  # padded: see DECODE_ROWS
    assert {name for graph in npu.graphs for name in SEVERAL.findall(graph.name)} == {"-b2", "-b4"}
    # The machine's torch_npu need not be the builder's: all make the same graphs.
    assert npu.needs == {"cann": "8.5.0"} and manifest.provenance["torch_npu"] == version("torch_npu")
    for graph in npu.graphs:
        assert (folder / graph.file).is_file() and (folder / graph.file).with_suffix(".txt").is_file()
    assert [gear.graph for gear in manifest.gears] == ["decode-kv128", "verify-t5-kv128"]
    script = (folder / "npu" / "atc.sh").read_text()
    assert (
        script.count("\natc ") == len(npu.graphs) and "--precision_mode_v2=origin" in script and "Ascend910B3" in script
    )
    assert encode(Bundle.open(folder).manifest) == encode(manifest)
    with pytest.raises(BundleError, match="no graph 'step' for a CPU; take --engine ge or another one for an NPU's"):
        Bundle.open(folder).graph("step")


def test_weights_are_the_checkpoints(copied: tuple[Path, Manifest], tiny_source: Path) -> None:
    folder, manifest = copied
    stored = load_file(tiny_source / "model.safetensors")
    assert manifest.graph_set("ge") is not None
    index = read_index(folder / manifest.graph_set("ge").index)
    found = map_npu_weights(folder / "npu", index)
    for name, tensor in found.items():
        parts = index.constants[name].parts
        assert tensor.dtype == (torch.float32 if name.endswith(".bias") else torch.bfloat16)
        if parts and all(part in stored for part in parts):
            assert torch.equal(tensor, torch.cat([stored[part] for part in parts])), name
    assert index.constants["layers.0.qkv.weight"].parts == tuple(
        f"model.layers.0.self_attn.{p}_proj.weight" for p in "qkv"
    )


def test_weights_bound_later_are_those_copied(
    copied: tuple[Path, Manifest], tmp_path: Path, request_: BuildRequest, tiny_source: Path
) -> None:
    shapes = tmp_path / "shapes"
    (shapes / "heads").mkdir(parents=True)
    (shapes / "config.json").write_text(
        json.dumps(json.loads((tiny_source / "config.json").read_text()) | {"torch_dtype": "bfloat16"})
    )
    (shapes / "heads" / "config.json").write_text('{"medusa_num_heads": 3, "medusa_num_layers": 1}')
    folder = tmp_path / "none"
    build(replace(request_, weights="none", model=shapes, drafter=shapes / "heads"), folder)
    assert not (folder / "npu" / "weights.bin").exists()
    before = files(folder)
    bound = bind(folder, tiny_source, tiny_source / "heads")
    after, whole = files(folder), files(copied[0])
    assert {name for name in after if before.get(name) != after[name]} == {"npu/weights.bin", "manifest.json"}
    assert after["npu/weights.bin"] == whole["npu/weights.bin"]
    # Two builds give equal bytes; the manifest notes that one was without weights, and its script asks for them.
    assert {name for name in after if after[name] != whole.get(name)} <= {"manifest.json", "npu/atc.sh"}
    assert after.keys() == {name for name in whole if not SEVERAL.search(name)}
    assert bound.teacher.digest == copied[1].teacher.digest
    assert encode(Bundle.open(folder).manifest) == encode(bound)
    with pytest.raises(BundleError, match="has its weights already"):
        bind(folder, tiny_source, tiny_source / "heads")


def without_weights(bundle: Path, folder: Path) -> Path:
    """A copy of a bundle as it is before its weights are bound."""
    manifest = read_manifest(bundle)
    shutil.copytree(bundle, folder, ignore=shutil.ignore_patterns("weights.bin"))
    others = {name: file for name, file in manifest.files.items() if name != "npu/weights.bin"}
    (folder / "manifest.json").write_bytes(encode(msgspec.structs.replace(manifest, files=others)))
    return folder


@pytest.fixture
def unbound(copied: tuple[Path, Manifest], tmp_path: Path) -> Path:
    return without_weights(copied[0], tmp_path / "unbound")


def test_end_tokens_are_those_of_the_bound_checkpoint(unbound: Path, tiny_source: Path, tmp_path: Path) -> None:
    """A description has config.json alone; the checkpoint has more end tokens in generation_config.json."""
    model = tmp_path / "model"
    shutil.copytree(tiny_source, model)
    (model / "generation_config.json").write_text('{"eos_token_id": [4, 7], "bos_token_id": 3}')
    described = read_manifest(unbound).teacher.eos
    bind(unbound, model, model / "heads")
    teacher = Bundle.open(unbound).manifest.teacher
    assert set(teacher.eos) == {*described, 4, 7} == set(teacher.config["eos"]) and teacher.bos == teacher.config["bos"]


def test_the_tokenizer_is_that_of_the_bound_checkpoint(unbound: Path, tiny_source: Path, tmp_path: Path) -> None:
    """A description may have none, or that of a model of the same sizes with another chat template."""
    model = tmp_path / "model"
    shutil.copytree(tiny_source, model)
    shutil.copyfile(TEACHER / "tokenizer.json", model / "tokenizer.json")
    assert not read_manifest(unbound).tokenizer
    for folder, template in ((unbound, "first"), (tmp_path / "again", "second")):
        if folder != unbound:
            without_weights(unbound, folder)
        (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
        assert bind(folder, model, model / "heads").tokenizer
        assert Bundle.open(folder).manifest.files["tokenizer/tokenizer.json"].bytes
        assert template in (folder / "tokenizer" / "tokenizer_config.json").read_text()


def test_linked_weights_are_used_where_they_lie(
    copied: tuple[Path, Manifest], tmp_path: Path, request_: BuildRequest, tiny_source: Path
) -> None:
    """The teacher's alone; a drafter's are copied."""
    folder = tmp_path / "linked"
    build(replace(request_, weights="link", drafter=None, trees=request_.trees[:1], prefill_rows=()), folder)
    index, whole = read_index(folder / "npu" / "weights.json"), read_index(copied[0] / "npu" / "weights.json")
    assert index.constants["embed.weight"].location == str((tiny_source / "model.safetensors").resolve())
    assert index.constants["layers.0.qkv.weight"].location == "weights.bin"  # three tensors of the checkpoint in one
    assert index.bytes < sum(whole.constants[name].length for name in index.constants)
    found, wanted = map_npu_weights(folder / "npu", index), map_npu_weights(copied[0] / "npu", whole)
    assert {name.partition(".")[0] for name in found} >= {"embed", "layers"} and found.keys() < wanted.keys()
    assert all(torch.equal(value, wanted[name]) for name, value in found.items())


def test_linked_weights_of_a_changed_checkpoint_are_refused(tmp_path: Path) -> None:
    """The others, which were copied, are still those of the checkpoint that was there."""
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(range(64)))
    index = plan_weights({"w": (8,)}, torch.bfloat16, "weights.bin", {}, {"w": (file, 16)})
    assert map_npu_weights(tmp_path, index)["w"].view(torch.uint8).tolist() == [*range(16, 32)]
    script, tools = tmp_path / "atc.sh", tmp_path / "tools"
    script.write_text(atc_script(["npu/draft.air"], linked=index.linked))
    tools.mkdir()
    (tools / "atc").write_text("#!/bin/sh\n")
    (tools / "atc").chmod(0o755)
    path = {"PATH": f"{tools}:{os.environ['PATH']}"}
    started = partial(subprocess.run, ["sh", script], env=path, capture_output=True, text=True)
    assert "has changed" not in started().stderr
    file.write_bytes(bytes(range(1, 65)))
    assert "atc.sh: the checkpoint has changed since the bundle was built" in started().stderr
    with pytest.raises(BundleError, match=r"model\.safetensors: has changed since the bundle was built"):
        map_npu_weights(tmp_path, index)
    file.unlink()
    with pytest.raises(BundleError, match="put the checkpoint back"):
        map_npu_weights(tmp_path, index)


@pytest.mark.parametrize(
    ("chip", "code", "said"),
    [
        ({}, 7, "a.air for Ascend910B3\n--soc_version=Ascend910B3\nb.air for Ascend910B3\n"),
        ({"SOC_VERSION": "Ascend910_9391"}, 7, "a.air for Ascend910_9391\n--soc_version=Ascend910_9391\nb.air for "),
        # As images of vllm-ascend have it.
        ({"SOC_VERSION": "ascend910b1"}, 1, "atc.sh: SOC_VERSION=ascend910b1 is no chip of ATC; expected a name such"),
    ],
)
def test_the_graph_and_chip_of_a_failure_are_named(tmp_path: Path, chip: dict[str, str], code: int, said: str) -> None:
    script, tools = tmp_path / "atc.sh", tmp_path / "tools"
    script.write_text(atc_script(["npu/a.air", "npu/b.air"]))
    tools.mkdir()
    (tools / "atc").write_text('#!/bin/sh\n[ "$3" != --model=b.air ] || exit 7; echo "$5"\n')
    (tools / "atc").chmod(0o755)
    path = {"PATH": f"{tools}:{os.environ['PATH']}"} | chip
    done = subprocess.run(["sh", script], env=path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert (done.returncode, (tmp_path / "om" / "manifest.sha256").exists()) == (code, False) and said in done.stdout


def test_a_path_that_atc_does_not_take_is_told_first(tmp_path: Path) -> None:
    """What an earlier run has compiled stays."""
    (tmp_path / "atc").touch(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    for name, taken in (("a-b_1.0", True), ("模型", True), ("my models", False), ("qwen+eagle", False)):
        folder = tmp_path / name / "npu"
        (folder / "om" / "old").mkdir(parents=True)
        (folder / "atc.sh").write_text(atc_script([]))
        (folder.parent / "manifest.json").touch()
        done = subprocess.run(["sh", folder / "atc.sh"], env=path, capture_output=True, text=True)
        assert (done.returncode == 0, (folder / "om" / "old").exists()) == (taken, not taken), done.stderr
        assert taken or f"letters, digits, - . and _: {folder}; move the bundle" in done.stderr


def test_packed_weights_ask_for_what_the_least_cann_has() -> None:
    """ATC of CANN 8.5.0 has no --deterministic_level, and ends at an option that it does not know."""
    more = set(atc_command("npu/a.air", "Ascend910B3", packed=True)) - set(atc_command("npu/a.air", "Ascend910B3"))
    assert more == {"--deterministic=1"}


def test_a_bundle_of_this_name_elsewhere_is_left_alone(tmp_path: Path) -> None:
    """CDPATH, if it is exported, leads a relative folder to another one."""
    for place in ("home", "here"):
        (tmp_path / place / "npu" / "om").mkdir(parents=True)
        (tmp_path / place / "npu" / "atc.sh").write_text(atc_script([]))
        (tmp_path / place / "manifest.json").touch()
    (tmp_path / "atc").touch(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CDPATH": str(tmp_path / "home")}
    subprocess.run(["sh", "npu/atc.sh"], cwd=tmp_path / "here", env=path, check=True)
    assert [len([*(tmp_path / place / "npu" / "om").iterdir()]) for place in ("home", "here")] == [0, 1]


def test_what_atc_writes_besides_lies_with_the_models(tmp_path: Path) -> None:
    """Elsewhere in the bundle a file that the manifest does not list is refused, at every opening."""
    script, tool = tmp_path / "npu" / "atc.sh", tmp_path / "atc"
    script.parent.mkdir()
    script.write_text(atc_script(["npu/a.air"]))
    tool.write_text('#!/bin/sh\necho > "${ASCEND_WORK_PATH:-.}/fusion_result.json"\n')
    tool.chmod(0o755)
    (tmp_path / "manifest.json").touch()
    subprocess.run(["sh", script], env={"PATH": f"{tmp_path}:{os.environ['PATH']}"}, check=True)
    assert sorted(path.name for path in script.parent.iterdir()) == ["atc.sh", "om"]


def test_graphs_without_weights_are_not_compiled(tmp_path: Path) -> None:
    script, tool = tmp_path / "npu" / "atc.sh", tmp_path / "atc"
    script.parent.mkdir()
    script.write_text(atc_script([], later="weights.bin"))
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    (tmp_path / "manifest.json").touch()
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    started = partial(subprocess.run, ["sh", script], env=path, capture_output=True, text=True)
    assert "built without weights: draftwood bind BUNDLE MODEL gives them" in started().stderr
    (script.parent / "weights.bin").touch()
    assert started().returncode == 0


def test_weights_of_another_model_are_refused(
    unbound: Path, tmp_path: Path, tiny_source: Path, save_pangu: Callable
) -> None:
    folder, other = unbound, tmp_path / "other"
    other.mkdir()
    save_pangu(other, torch.bfloat16)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rope_theta": 10000.0}))
    manifest = read_manifest(folder)
    (folder / "manifest.json").write_bytes(encode(msgspec.structs.replace(manifest, drafter=None)))
    with pytest.raises(CheckpointError, match=r"rope_theta is 10000\.0; the graphs of .* expect 16000000\.0"):
        bind(folder, other, None)
    with pytest.raises(RequestError, match="the bundle has no drafter; leave it out"):
        bind(folder, tiny_source, tiny_source / "heads")
    assert sorted(p.name for p in (folder / "npu").iterdir() if p.suffix == ".bin") == []
    tensors = load_file(tiny_source / "model.safetensors")
    save_file({name: t for name, t in tensors.items() if "norm" not in name}, other / "model.safetensors")
    with pytest.raises(CheckpointError, match="tensors missing"):
        bind(folder, other, None)


def test_impossible_requests(tmp_path: Path, request_: BuildRequest) -> None:
    with pytest.raises(RequestError, match="ONNX graphs need their weights; give --target ge alone"):
        build(replace(request_, targets=("onnx", "ge"), weights="none"), tmp_path / "a")
    with pytest.raises(
        RequestError, match="--one-launch: is a step for NPUs, and slower on a CPU; expected --target ge"
    ):
        build(replace(request_, targets=("onnx",), whole=True), tmp_path / "a")
    with pytest.raises(RequestError, match="--one-launch: 2 ranks take the parts of a step one by one"):
        build(replace(request_, whole=True, ranks=2), tmp_path / "a")
    with pytest.raises(RequestError, match="prefill_rows 0: expected chunks of 1 token or more"):
        build(replace(request_, prefill_rows=(0,)), tmp_path / "b")
    assert list(tmp_path.iterdir()) == []
