"""Building a bundle: whole or not at all, equal bytes for equal inputs, and refusals before any work."""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import Field, asdict, fields, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from safetensors.torch import load_file, save_file

import draftwood
from draftwood.compiler.bundle import build as writer
from draftwood.compiler.bundle.build import build
from draftwood.compiler.bundle.request import BuildRequest
from draftwood.compiler.drafters.medusa.checkpoint import MedusaCheckpoint
from draftwood.compiler.onnx import layouts, lowering
from draftwood.compiler.targets import onnx as module
from draftwood.compiler.targets.modules import load_modules
from draftwood.compiler.teachers.checkpoint import Checkpoint
from draftwood.errors import CheckpointError, RequestError, TreeError, UserError
from draftwood.manifest import SCHEMA_VERSION, File, Manifest, encode
from draftwood.trees import Topology
from draftwood.trees.frozen import thaw

PLAIN = ("plain", Topology.plain())
GRAPHS = ["step", "grouped", "prefill-t32-kv128", "decode-kv128", "verify-t7-kv128", "draft"]


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory, save_llama: Callable) -> tuple[Path, BuildRequest, Manifest]:
    """A tied Llama of one layer without drafter and without tokenizer, at two KV lengths."""
    source = tmp_path_factory.mktemp("bare")
    save_llama(source, tie_word_embeddings=True, num_hidden_layers=1)
    request = BuildRequest(model=source, drafter=None, trees=(PLAIN,), slots=(128, 256))
    folder = source.parent / "bare-bundle"
    return folder, request, build(request, folder)


def test_manifest_digests_are_right(built: Any) -> None:
    files = contents(built.folder)
    manifest = files.pop("manifest.json")
    assert manifest == encode(built.manifest)
    assert encode(msgspec.json.decode(manifest, type=Manifest)) == manifest
    assert built.manifest.files == {
        name: File(bytes=len(data), sha256=hashlib.sha256(data).hexdigest()) for name, data in files.items()
    }


def test_two_builds_are_equal_byte_for_byte(built: Any, tmp_path: Path) -> None:
    build(built.request, tmp_path / "again")
    first, second = contents(built.folder), contents(tmp_path / "again")
    assert first.keys() == second.keys()
    assert [name for name in first if first[name] != second[name]] == []


def test_with_a_drafter(built: Any) -> None:
    manifest = built.manifest
    drafter = MedusaCheckpoint.open(built.request.drafter, Checkpoint.open(built.request.model).config)
    assert manifest.drafter is not None and manifest.drafter.digest == drafter.digest()
    assert manifest.drafter.levels == 3 and manifest.drafter.config == asdict(drafter.config)
    assert manifest.drafter.candidates == 10
    assert [graph.name for graph in manifest.graphs_of("onnx")] == GRAPHS
    assert [(gear.name, gear.graph) for gear in manifest.gears] == [
        ("plain-kv128", "decode-kv128"), ("ragged-kv128", "verify-t7-kv128"),
    ]  # fmt: skip
    dims = manifest.dims
    assert (dims.branch_rows, dims.path_rows, dims.context, dims.vocabulary) == (7, 4, 127, 101)


def test_without_a_drafter(bare: tuple[Path, BuildRequest, Manifest]) -> None:
    folder, request, manifest = bare
    assert manifest.drafter is None and not manifest.tokenizer and not (folder / "tokenizer").exists()
    assert {graph.kind for graph in manifest.graphs_of("onnx")} == {"step", "grouped", "prefill", "decode"}
    assert [gear.name for gear in manifest.gears] == ["plain-kv128", "plain-kv256"]
    assert manifest.teacher.digest == Checkpoint.open(request.model).digest()
    assert manifest.dims.context == 255
    assert not any("draft" in name or "heads" in name for name in contents(folder))


def test_tokenizer_is_copied(built: Any) -> None:
    assert built.manifest.tokenizer
    copied = {path.name: path.read_text() for path in (built.folder / "tokenizer").iterdir()}
    assert copied == {"tokenizer.json": '{"version": "1.0"}', "tokenizer_config.json": "{}"}


def test_the_target_names_the_files_of_its_graphs(built: Any) -> None:
    graphs = built.manifest.graphs_of("onnx")
    assert [graph.file for graph in graphs] == [f"onnx/{graph.name}.onnx" for graph in graphs]
    assert all((built.folder / graph.file).is_file() for graph in graphs)


def test_trees_are_frozen_in(built: Any) -> None:
    for (name, tree), entry in zip(built.request.trees, built.manifest.trees, strict=True):
        topology, buffers = thaw((built.folder / entry.file).read_text(), entry.file)
        assert topology == tree and (entry.name, entry.rows, entry.depth) == (name, buffers.rows, buffers.depth)


def test_weights_are_those_of_the_checkpoint(built: Any) -> None:
    checkpoint, stored = (
        Checkpoint.open(built.request.model),
        load_file(built.folder / built.manifest.graph_set("onnx").weights),
    )
    for name in checkpoint.names():
        assert stored.pop(name).equal(checkpoint.weight(name).float())
    assert {name.partition(".")[0] for name in stored} == {"heads", "layouts", "rope_cos", "rope_sin"}
    assert stored["rope_cos"].shape == (128, 16)


def test_modules_of_a_bundle_without_drafter(bare: tuple[Path, BuildRequest, Manifest]) -> None:
    folder, request, manifest = bare
    weights = folder / manifest.graph_set("onnx").weights
    decoder, heads = load_modules(weights, Checkpoint.open(request.model).config, None)
    assert heads is None and not any(parameter.requires_grad for parameter in decoder.parameters())
    assert not hasattr(decoder, "lm_head") and decoder.rope_cos.shape == (256, 16)


def test_files_say_nothing_of_the_builder(built: Any) -> None:
    for name, data in contents(built.folder).items():
        assert str(built.request.model).encode() not in data and b"/tmp" not in data, name


def test_others_may_read_the_folder(built: Any) -> None:
    assert built.folder.stat().st_mode & 0o777 == 0o755


def fail_late(error: BaseException) -> Callable[..., None]:
    """A lowering that writes two graphs, then fails."""
    left = iter(range(2))

    def lowering(step: object, program: object, spans: object, weights_file: str, path: Path, *_: object) -> None:
        if next(left, None) is None:
            raise error
        path.write_text("graph")

    return lowering


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (RuntimeError("torch.export"), RuntimeError),
        (OSError(28, "No space left on device"), RequestError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
    ids=["our fault", "full disk", "interrupted"],
)
def test_a_failed_build_leaves_nothing(
    built: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, raised: type
) -> None:
    monkeypatch.setattr(module, "trace", lambda step: None)
    monkeypatch.setattr(lowering, "lower_to_onnx", fail_late(error))
    with pytest.raises(raised):
        build(built.request, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def nothing_is_lowered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "trace", lambda step: None)
    monkeypatch.setattr(lowering, "lower_to_onnx", lambda *_: None)
    monkeypatch.setattr(layouts, "lay_out", lambda *_: None)


def test_a_folder_that_appears_meanwhile_is_not_overwritten(
    built: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing_is_lowered(monkeypatch)

    def appear(*_: object) -> bool:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "theirs").write_text("")
        return False

    monkeypatch.setattr(writer, "_copy_tokenizer", appear)
    with pytest.raises(RequestError, match="cannot be written"):
        build(built.request, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert list(contents(tmp_path / "out")) == ["theirs"]


ODD = (None, 5, -1, 1.5, "onnx", "\ud800", b"x", [128], (1.5,), ("a", 1), {"a": 1}, {1: 2}, object(), int)
# Values of ODD that are right.
RIGHT = {"drafter": (None,), "corpus": (None,), "plan": (None,), "ranks": (5, -1), "texts": (5, -1)}
RIGHT |= dict.fromkeys(("weights", "precision"), ("onnx", "\ud800"))


@pytest.mark.parametrize("field", fields(BuildRequest), ids=lambda field: field.name)
def test_a_value_of_another_type_is_refused_in_one_line(built: Any, tmp_path: Path, field: Field) -> None:
    for value in ODD:
        with pytest.raises(UserError) as caught:
            draftwood.build(replace(built.request, **{field.name: value}), tmp_path / "out", nothing_is_made)
        wrong = str(caught.value).startswith(f"{field.name}: expected ")
        assert wrong != any(value is right for right in RIGHT.get(field.name, ())), caught.value
    assert list(tmp_path.iterdir()) == []


def nothing_is_made(stage: str) -> None:
    raise CheckpointError(stage)


DEEP = ("deep", Topology.chain(4))
REFUSED = [
    pytest.param({"slots": (100,)}, RequestError, "--kv 100: .*multiple of 128", id="not a multiple"),
    pytest.param({"slots": (0,)}, RequestError, "--kv 0: .*positive", id="zero"),
    pytest.param({"slots": (-128,)}, RequestError, "--kv -128: .*positive", id="negative"),
    pytest.param({"slots": (128, 384)}, RequestError, "knows 256 positions; choose at most 256", id="too long"),
    pytest.param({"trees": (PLAIN, DEEP)}, TreeError, "deep: 4 levels deep, but .* 3 heads", id="too deep"),
    pytest.param(
        {"trees": (PLAIN, ("one", Topology.chain(1))), "drafter": None}, TreeError, "no --drafter", id="no heads"
    ),
    pytest.param(
        {"trees": (PLAIN, ("wide", Topology.full((5, 5, 5))))}, TreeError, "156 rows do not fit KV", id="too many rows"
    ),
    pytest.param({"slots": ()}, RequestError, "slots: none", id="no KV length"),
    pytest.param({"slots": (256, 128)}, RequestError, "slots .*ascending", id="lengths out of order"),
    pytest.param({"prefill_rows": (8, 8)}, RequestError, "prefill_rows .*each once", id="rows twice"),
    pytest.param({"trees": ()}, TreeError, "named plain", id="no trees"),
    pytest.param({"trees": (("plain", Topology.chain(2)),)}, TreeError, "one row, named plain", id="plain is none"),
    pytest.param({"trees": (PLAIN, ("../x", Topology.chain(2)))}, TreeError, "'../x': expected a name", id="path"),
    pytest.param({"trees": (PLAIN, ("plain", Topology.chain(2)))}, TreeError, "each once", id="name twice"),
    pytest.param({"trees": (PLAIN, ("rare", Topology.from_paths([(101,)])))}, TreeError, "rank 101 is past", id="rank"),
]


@pytest.mark.parametrize(("changes", "error", "message"), REFUSED)
def test_refused(built: Any, tmp_path: Path, changes: dict, error: type[UserError], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        build(replace(built.request, **changes), tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("make", [Path.mkdir, Path.touch], ids=["folder", "file"])
def test_an_existing_target_is_refused(built: Any, tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "out")
    with pytest.raises(RequestError, match="exists already"):
        build(built.request, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_target_below_a_file_is_refused(built: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RequestError, match="cannot be written"):
        build(built.request, tmp_path / "file" / "out")


@pytest.fixture
def damaged(tmp_path: Path, save_llama: Callable) -> Iterator[BuildRequest]:
    """A teacher without its last norm."""
    save_llama(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors.pop("model.norm.weight")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    yield BuildRequest(model=tmp_path, drafter=None, trees=(PLAIN,), slots=(128,))


def test_a_missing_tensor_is_refused(damaged: BuildRequest, tmp_path_factory: pytest.TempPathFactory) -> None:
    where = tmp_path_factory.mktemp("out")
    with pytest.raises(CheckpointError, match=r"1 tensors missing, first model\.norm\.weight"):
        build(damaged, where / "out")
    assert list(where.iterdir()) == []


def test_progress_names_every_graph(built: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing_is_lowered(monkeypatch)
    seen: list[str] = []
    build(built.request, tmp_path / "out", seen.append)
    assert seen == ["weights", *GRAPHS, "layouts"]


def test_manifest_is_readable_json(built: Any) -> None:
    text = (built.folder / "manifest.json").read_text()
    fields = json.loads(text)
    assert fields["schema_version"] == SCHEMA_VERSION and list(fields) == sorted(fields)
    assert fields["provenance"].keys() >= {"draftwood", "torch", "onnx"}
