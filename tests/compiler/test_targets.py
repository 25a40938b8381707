"""A target is one class and one registration: a toy one, added here and nowhere else, is built for."""

from collections.abc import Callable
from pathlib import Path

import pytest

from draftwood.compiler.bundle.build import build
from draftwood.compiler.bundle.request import BuildRequest
from draftwood.compiler.targets import registry
from draftwood.compiler.targets.steps import static_steps
from draftwood.compiler.targets.storage import BF16, Storage
from draftwood.compiler.targets.target import Lowering, Target
from draftwood.compiler.teachers.config import TeacherConfig
from draftwood.errors import RequestError
from draftwood.manifest import GraphSet
from draftwood.runtime.bundle import Bundle
from draftwood.trees import Topology

TREES = (("plain", Topology.plain()), ("chain", Topology.chain(2)))


class Listing(Target):
    """Writes every step as the list of its inputs, and the weights as the list of their names and types."""

    name, modes = "listing", ("copy", "none")

    def precision(self, config: TeacherConfig) -> Storage:
        return BF16

    def check_installed(self) -> None:
        pass

    def check(self, precision: Storage) -> None:
        pass

    def lower(self, lowering: Lowering) -> tuple[GraphSet, ...]:
        types, shapes = lowering.precision.types, lowering.shapes
        (lowering.folder / "listing").mkdir()
        graphs = []
        for step in static_steps(shapes, shapes.sizes(types.activations), lowering.modules()[0]):
            signature = step.signature.frozen_in(f"listing/{step.signature.name}")
            (lowering.folder / signature.file).write_text("\n".join(spec.name for spec in signature.inputs))
            graphs.append(signature)
        weights = "\n".join(f"{entry.name} {entry.read().dtype}" for entry in lowering.weights)
        (lowering.folder / "listing" / "weights").write_text(weights)
        file = "listing/weights"
        graph_set = GraphSet(
            target=self.name, rank=0, ranks=1, precision=types, weights=file, index=None, soc=None, graphs=tuple(graphs)
        )
        return (graph_set,)


def request(model: Path, **fields: object) -> BuildRequest:
    return BuildRequest(model=model, drafter=None, trees=TREES[:1], slots=(128,), prefill_rows=(8,), **fields)


def test_a_toy_target(tiny_teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.TARGETS, "listing", Listing())
    build(request(tiny_teacher, targets=("listing",)), tmp_path / "bundle")
    manifest = Bundle.open(tmp_path / "bundle").manifest
    graphs = manifest.graph_set("listing")
    assert graphs is not None and manifest.graph_sets == (graphs,) and graphs.precision.name == "bf16"
    assert [graph.name for graph in graphs.graphs] == ["prefill-t8-kv128", "decode-kv128"]
    assert [gear.graph for gear in manifest.gears] == ["decode-kv128"]
    assert {spec.dtype for graph in graphs.graphs for spec in graph.inputs} == {"int64", "bool", "bfloat16"}
    listed = (tmp_path / "bundle" / "listing" / "weights").read_text()
    assert "layers.1.down.weight torch.bfloat16" in listed


def test_what_a_target_cannot_do_is_refused(
    tiny_teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(registry.TARGETS, "listing", Listing())
    with pytest.raises(RequestError, match="--weights link: LISTING graphs need their weights"):
        build(request(tiny_teacher, targets=("listing",), weights="link"), tmp_path / "a")
    with pytest.raises(RequestError, match="--target gpu: expected one or more of onnx, ge, listing"):
        build(request(tiny_teacher, targets=("gpu",)), tmp_path / "b")
    assert list(tmp_path.iterdir()) == []


def test_a_build_for_a_cpu_loads_nothing_of_an_npu(
    tiny_teacher: Path, tiny_heads: Path, tmp_path: Path, python: Callable[..., str]
) -> None:
    flags = [tiny_teacher, "--drafter", tiny_heads, "--tree", "chain:2", "--kv", "128", "--out", "bundle"]
    arguments = ["build", *map(str, flags)]
    blocked = ("draftwood.compiler.ge", "draftwood.compiler.device")
    python(f"from draftwood.tools.cli import main; assert main({arguments!r}) == 0", blocked=blocked)
    assert Bundle.open(tmp_path / "bundle").manifest.graph_set("ge") is None
