"""Bundles with EAGLE-3 and FastEagle drafters: their manifests and files, and refusals before any work."""

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import msgspec
import onnx
import pytest
import torch
from safetensors.torch import load_file

from draftwood.compiler.bundle.build import build
from draftwood.compiler.bundle.request import BuildRequest
from draftwood.compiler.checkpoints.safetensors_file import byte_offset
from draftwood.compiler.drafters.registry import drafter_of, open_drafter
from draftwood.compiler.onnx.lowering import lower_to_onnx
from draftwood.compiler.onnx.weights import WeightSpan
from draftwood.compiler.steps.tracing import trace
from draftwood.compiler.targets.modules import load_modules
from draftwood.compiler.targets.steps import rebuild_drafts
from draftwood.compiler.teachers.checkpoint import Checkpoint
from draftwood.compiler.teachers.config import TeacherConfig
from draftwood.errors import CheckpointError, TreeError, UserError
from draftwood.manifest import read_manifest
from draftwood.runtime.bundle import Bundle
from draftwood.tools.cli import main
from draftwood.trees import Topology, parse_specs
from draftwood.trees.spec import Budget

PLAIN = ("plain", Topology.plain())
DRAFTS = {"eagle3": ["draft-backbone", "draft-planned", "draft-budget"], "fasteagle": ["draft"]}
LENGTHS = {"eagle3": (128,), "fasteagle": (128, 256)}
# Of any size, and static at every KV length.
GRAPHS = {
    kind: ["extend", *drafts] + [f"{name}-kv{slots}" for slots in LENGTHS[kind] for name in ("extend-t16", *drafts)]
    for kind, drafts in DRAFTS.items()
}


@pytest.fixture(params=["eagle3", "fasteagle"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def test_the_manifest_describes_the_drafter(
    kind: str, tiny_teacher: Path, tiny_drafters: dict[str, Path], tiny_draft_bundles: dict[str, Path]
) -> None:
    manifest = read_manifest(tiny_draft_bundles[kind])
    opened = open_drafter(tiny_drafters[kind], Checkpoint.open(tiny_teacher))
    entry = manifest.drafter
    assert entry is not None and entry.kind == opened.model.kind == kind and entry.digest == opened.digest()
    # The eager reference is rebuilt from the checkpoint's own fields.
    assert drafter_of(entry) == opened.model
    assert msgspec.json.decode(msgspec.json.encode(asdict(opened.model.config))) == entry.config
    layers, levels, candidates = {"eagle3": (1, 3, 3), "fasteagle": (3, 3, 10)}[kind]
    assert (entry.features, entry.levels, entry.candidates) == (192, levels, candidates)
    names = [f"draft_{side}_cache.{layer}" for layer in range(layers) for side in ("key", "value")]
    assert [(rows.name, rows.heads, rows.width) for rows in entry.buffers] == [(name, 2, 16) for name in names]


def test_every_tree_has_its_draft_graph(kind: str, tiny_draft_bundles: dict[str, Path]) -> None:
    manifest = read_manifest(tiny_draft_bundles[kind])
    assert [graph.name for graph in manifest.graphs_of("onnx") if graph.kind in ("extend", "draft")] == GRAPHS[kind]
    for gear in manifest.gears:
        own = None if gear.tree == "plain" else f"draft-{gear.tree}" if kind == "eagle3" else "draft"
        assert gear.draft == own and gear.graph.startswith("decode" if own is None else "verify-t7")
    name, graphs = DRAFTS[kind][0], {graph.name: graph for graph in manifest.graphs_of("onnx")}
    for draft, sizes in ((graphs[name], (0, 0, False)), (graphs[f"{name}-kv128"], (4, 128, True))):
        assert (draft.rows, draft.slots, draft.static) == sizes
        assert draft.caches[:2] == ["draft_key_cache.0", "draft_value_cache.0"]
        assert [spec.name for spec in draft.inputs[:4]] == ["tokens", "features", "committed", "accepted"]


def test_a_budget_tree_has_no_file(tiny_draft_bundles: dict[str, Path]) -> None:
    manifest = read_manifest(tiny_draft_bundles["eagle3"])
    budget = next(tree for tree in manifest.trees if tree.name == "budget")
    assert (budget.file, budget.rows, budget.depth, budget.width) == (None, 7, 3, 3)
    assert sorted(name for name in manifest.files if name.startswith("trees/")) == [
        "trees/backbone.json", "trees/plain.json", "trees/planned.json",
    ]  # fmt: skip


def test_teacher_and_drafter_share_what_they_can(
    kind: str, tiny_teacher: Path, tiny_drafters: dict[str, Path], tiny_draft_bundles: dict[str, Path]
) -> None:
    stored = load_file(tiny_draft_bundles[kind] / "onnx" / "weights.safetensors")
    opened = open_drafter(tiny_drafters[kind], Checkpoint.open(tiny_teacher)).checkpoint
    for name in opened.names():
        assert torch.equal(stored[name], opened.weight(name).float())
    for name, value in opened.buffers(stored["rope_cos"].shape[0]).items():
        assert stored[name].dtype == value.dtype and torch.equal(stored[name], value)
    assert stored["teacher_ids"].dtype == torch.int64 and "draft_embed.weight" not in stored
    for graph in GRAPHS[kind]:  # neither the embedding nor the output matrix is written into a graph
        assert (tiny_draft_bundles[kind] / "onnx" / f"{graph}.onnx").stat().st_size < 300 * 64 * 4


@pytest.mark.parametrize("kind", ["fasteagle", pytest.param("eagle3", marks=pytest.mark.slow)], indirect=True)
def test_what_is_rebuilt_from_the_manifest_lowers_to_equal_bytes(
    kind: str, tiny_draft_bundles: dict[str, Path], tmp_path: Path
) -> None:
    """The drafter's steps, made anew from a bundle's manifest, trees and weights, are those it was built from."""
    bundle = Bundle.open(tiny_draft_bundles[kind])
    manifest, file = bundle.manifest, bundle.folder / "onnx" / "weights.safetensors"
    assert manifest.drafter is not None
    config = msgspec.convert(manifest.teacher.config, TeacherConfig)
    modules = load_modules(file, config, drafter_of(manifest.drafter))
    spans = {name: WeightSpan(tuple(t.shape), byte_offset(file, name), t.nbytes) for name, t in load_file(file).items()}
    topologies = {name: topology for name, (topology, _) in bundle.trees.items()}
    steps = rebuild_drafts(manifest, manifest.graph_set("onnx"), topologies, modules)
    assert list(steps) == GRAPHS[kind]
    shutil.copyfile(file, tmp_path / file.name)  # a graph is checked with its weights next to it
    for name, step in steps.items():
        lower_to_onnx(step, trace(step), spans, file.name, tmp_path / f"{name}.onnx")
        built = onnx.load(bundle.folder / "onnx" / f"{name}.onnx", load_external_data=False)
        for tensor in built.graph.initializer:  # layouts are added to a graph that is whole
            for entry in [entry for entry in tensor.external_data if entry.key.startswith("prepacked")]:
                tensor.external_data.remove(entry)
        assert onnx.load(tmp_path / f"{name}.onnx", load_external_data=False) == built


REFUSED = [
    ("fasteagle", Topology.chain(4), "deep: 4 levels deep, but the drafter has 3 levels"),
    ("fasteagle", Budget(4, 2, 2), "a budget tree follows candidates .* it needs an EAGLE-3 drafter"),
    ("eagle3", Topology.from_paths([(258,)]), "rank 258 is past the drafter's vocabulary of 258"),
    ("fasteagle", Topology.from_paths([(280,)]), "rank 280 is past the drafter's vocabulary of 280"),
]


@pytest.mark.parametrize(("kind", "tree", "message"), REFUSED)
def test_trees_that_a_drafter_cannot_draft(
    kind: str, tree: Topology | Budget, message: str, tiny_teacher: Path, tiny_drafters: dict[str, Path], tmp_path: Path
) -> None:
    request = BuildRequest(model=tiny_teacher, drafter=tiny_drafters[kind], trees=(PLAIN, ("deep", tree)), slots=(128,))
    refused(request, tmp_path, TreeError, message)


def refused(request: BuildRequest, folder: Path, error: type[UserError], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        build(request, folder / "out")
    assert "\n" not in str(caught.value) and not (folder / "out").exists()


def test_a_budget_tree_needs_candidates_of_its_own(tiny_teacher: Path, tiny_heads: Path, tmp_path: Path) -> None:
    request = BuildRequest(model=tiny_teacher, drafter=tiny_heads, trees=(PLAIN, ("b", Budget(4, 2, 2))), slots=(128,))
    refused(request, tmp_path, TreeError, "it needs an EAGLE-3 drafter")


def test_drafters_that_do_not_fit(tiny_teacher: Path, tiny_drafters: dict[str, Path], tmp_path: Path) -> None:
    request = BuildRequest(model=tiny_teacher, drafter=tmp_path, trees=(PLAIN,), slots=(128,))
    refused(request, tmp_path, CheckpointError, "no drafter; expected a folder with medusa_lm_head.safetensors")
    for kind, folder in tiny_drafters.items():
        other = Path(shutil.copytree(folder, tmp_path / kind))
        fields = json.loads((folder / "config.json").read_text())
        (other / "config.json").write_text(json.dumps(fields | {"aux_layer_ids": [0, 1, 3]}))
        refused(replace(request, drafter=other), tmp_path, CheckpointError, r"\[0, 1, 3\]; expected ascending ids")
        for path in other.glob("*.safetensors"):
            path.unlink()
        described = replace(request, drafter=other, targets=("ge",), weights="none")
        refused(described, tmp_path, CheckpointError, "model.safetensors")


def test_budget_specs() -> None:
    assert parse_specs("budget:24x5x4") == [PLAIN, ("budget-24x5x4", Budget(24, 5, 4))]
    for text, message in (
        ("budget:5x1x4", "1 to 4 nodes"),
        ("budget:5x2", "whole numbers from 1"),
        ("budget:300x9x9", "at most 256 rows"),
    ):
        with pytest.raises(TreeError, match=message):
            parse_specs(text)


def test_the_command_line_refuses_in_one_line(
    tiny_teacher: Path, tiny_drafters: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [str(tiny_teacher), "--drafter", str(tiny_drafters["fasteagle"]), "--kv", "128"]
    assert main(["build", *options, "--tree", "budget:4x2x2", "--out", str(tmp_path / "b")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
