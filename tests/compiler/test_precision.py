"""A precision is data of a bundle: its work on weights goes through one object, which a toy one replaces."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftwood import manifest as m
from draftwood.compiler.bundle.build import build
from draftwood.compiler.bundle.request import BuildRequest
from draftwood.compiler.checkpoints.weight import WeightEntry
from draftwood.compiler.targets.storage import BF16, FP16, FP32, Storage
from draftwood.errors import CheckpointError, RequestError
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.decoding import Decoding
from draftwood.runtime.engines.cpu import CpuEngine
from draftwood.runtime.options import Options
from draftwood.runtime.policy import FixedTree
from draftwood.trees import Topology

PLAIN = ("plain", Topology.plain())


class Rounded(Storage):
    """Weights of bf16 values, kept as fp32."""

    def convert(self, name: str, value: Tensor) -> Tensor:
        return value.bfloat16().float()


TOY = Rounded(m.Precision(name="toy", weights="float32", activations="float32", caches="float32"))


@pytest.fixture(scope="module")
def toy(tiny_teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("toy") / "bundle"
    request = BuildRequest(
        model=tiny_teacher, drafter=None, trees=(PLAIN,), slots=(128,), prefill_rows=(), precisions={"onnx": TOY}
    )
    build(request, folder)
    return Bundle.open(folder)


def decoded(bundle: Bundle) -> tuple[int, ...]:
    options = Options(max_new_tokens=12, ignore_eos=True)
    return tuple(Decoding(CpuEngine(bundle), [3, 5, 7], options, FixedTree(bundle)).run().token_ids)


def test_a_toy_precision_builds_runs_and_says_its_name(toy: Bundle, tiny_teacher: Path, tmp_path: Path) -> None:
    graphs = toy.manifest.graph_set("onnx")
    assert graphs is not None and graphs.precision == TOY.types
    stored, published = load_file(toy.folder / graphs.weights), load_file(tiny_teacher / "model.safetensors")
    norm, embedding = published["model.norm.weight"], published["model.embed_tokens.weight"]
    assert torch.equal(stored["embed.weight"], embedding.bfloat16().float())
    assert not torch.equal(stored["embed.weight"], embedding) and torch.equal(stored["norm.weight"], norm)
    # The same as a teacher that was published with those values.
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((tiny_teacher / name).read_bytes())
    save_file({name: t.bfloat16().float() for name, t in published.items()}, tmp_path / "model.safetensors")
    request = BuildRequest(model=tmp_path, drafter=None, trees=(PLAIN,), slots=(128,), prefill_rows=())
    build(request, tmp_path / "bundle")
    assert decoded(toy) == decoded(Bundle.open(tmp_path / "bundle"))


def test_targets_say_their_precision(tiny_bundle: Path) -> None:
    graphs = m.read_manifest(tiny_bundle).graph_set("onnx")
    assert graphs is not None and graphs.precision == FP32.types
    assert (graphs.precision.weights, graphs.precision.activations, graphs.precision.caches) == ("float32",) * 3


@pytest.mark.parametrize(("target", "precision"), [("onnx", BF16), ("ge", FP32)])
def test_a_precision_that_a_target_cannot_compute_in(
    tiny_teacher: Path, tmp_path: Path, target: str, precision: Storage
) -> None:
    request = BuildRequest(
        model=tiny_teacher,
        drafter=None,
        trees=(PLAIN,),
        slots=(128,),
        targets=(target,),
        precisions={target: precision},
    )
    with pytest.raises(RequestError, match=f"precision {precision.types.name}: keeps numbers in") as caught:
        build(request, tmp_path / "out")
    assert "\n" not in str(caught.value) and list(tmp_path.iterdir()) == []


def test_a_weight_past_the_range_of_its_type_is_refused() -> None:
    entry = WeightEntry("down", (2,), lambda: torch.tensor([1.0, -7e4]), ("model.down_proj.weight",))
    assert torch.equal(BF16.stored(entry).read(), torch.tensor([1.0, -7e4]).bfloat16())
    with pytest.raises(CheckpointError, match=r"model\.down_proj\.weight: holds 70000; expected at most 65504, the"):
        FP16.stored(entry).read()


def test_whole_numbers_keep_their_type() -> None:
    entry = WeightEntry("ids", (2,), lambda: torch.tensor([1, 2]), dtype=torch.int64)
    assert TOY.stored(entry) is entry and BF16.stored(replace(entry, dtype=None)).dtype == torch.bfloat16


def test_graph_sets_are_picked_by_target_and_rank(tiny_bundle: Path) -> None:
    manifest = m.read_manifest(tiny_bundle)
    (only,) = manifest.graph_sets
    assert (only.target, only.rank, only.ranks) == ("onnx", 0, 1) and manifest.graph_set("onnx") is only
    assert manifest.graphs_of("onnx") is only.graphs and manifest.graph_set("ge") is None
    halves = tuple(msgspec.structs.replace(only, rank=rank, ranks=2, weights=f"onnx/{rank}") for rank in (0, 1))
    two = msgspec.json.decode(m.encode(msgspec.structs.replace(manifest, graph_sets=halves)), type=m.Manifest)
    found = two.graph_set("onnx", rank=1)
    assert found is not None and (found.weights, found.rank, found.ranks) == ("onnx/1", 1, 2)
    assert two.graph_set("onnx") == halves[0] and two.graph_set("onnx", rank=2) is None
    assert two.graphs_of("onnx", rank=2) == ()
