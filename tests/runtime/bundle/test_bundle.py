import json
import os
import shutil
from pathlib import Path

import msgspec
import pytest

from draftwood.errors import BundleError
from draftwood.manifest import SCHEMA_VERSION, list_file
from draftwood.runtime.bundle import Bundle
from draftwood.tools.commands.serve import named


@pytest.fixture
def copy(tiny_bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_bundle, tmp_path / "copy"))


@pytest.mark.parametrize("name", ["onnx/weights.safetensors", "onnx/step.onnx", "trees/ragged.json"])
@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing"])
def test_a_damaged_file_is_named(copy: Path, name: str, damage: str) -> None:
    path = copy / name
    data = bytearray(path.read_bytes())
    if damage == "missing":
        path.unlink()
    elif damage == "truncated":
        path.write_bytes(data[:-1])
    else:
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    with pytest.raises(BundleError, match=f"{name}.*(missing|altered)"):
        Bundle.open(copy)


def edited(copy: Path, **fields: object) -> Path:
    manifest = json.loads((copy / "manifest.json").read_text())
    (copy / "manifest.json").write_text(json.dumps(manifest | fields))
    return copy


def test_another_schema_version_is_refused(copy: Path) -> None:
    with pytest.raises(BundleError, match=f"schema version 99, expected {SCHEMA_VERSION}; build the bundle again"):
        Bundle.open(edited(copy, schema_version=99))


def test_an_unknown_field_is_refused(copy: Path) -> None:
    with pytest.raises(BundleError, match=r"damaged.*surprise"):
        Bundle.open(edited(copy, surprise=1))


def test_a_manifest_that_is_no_json_is_refused(copy: Path) -> None:
    (copy / "manifest.json").write_text("{")
    with pytest.raises(BundleError, match="damaged"):
        Bundle.open(copy)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("empty", r"no readable manifest\.json .*; expected a bundle"),
        ("missing", "no such folder; expected a bundle"),
        ("model.gguf", r"no bundle but a model; .*draftwood make .*model\.gguf --out BUNDLE"),
        ("checkpoint", r"no bundle but a model; .*draftwood make .*checkpoint --out BUNDLE"),
    ],
)
def test_a_path_that_is_no_bundle_is_refused_with_the_way_to_one(name: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "config.json").write_text("{}")
    with pytest.raises(BundleError, match=says):
        Bundle.open(tmp_path / name)
    with pytest.raises(BundleError, match=says):
        named([f"name={tmp_path / name}"])


def test_a_served_folders_path_may_have_an_equals_sign(tiny_bundle: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run=3"
    folder.symlink_to(tiny_bundle)
    assert named([str(folder), f"x={folder}"]) == {tiny_bundle.name: folder, "x": folder}


def test_a_tree_with_a_cycle_is_refused(copy: Path) -> None:
    path = copy / "trees" / "ragged.json"
    tree = json.loads(path.read_text())
    tree["parents"][1], tree["parents"][4] = 4, 1
    path.write_text(json.dumps(tree))
    manifest = json.loads((copy / "manifest.json").read_text())
    files = manifest["files"] | {"trees/ragged.json": msgspec.to_builtins(list_file(path))}
    with pytest.raises(BundleError, match=r"ragged\.json"):
        Bundle.open(edited(copy, files=files))


def test_a_path_that_no_engine_opens_is_refused(tmp_path: Path) -> None:
    (folder := tmp_path / os.fsdecode(b"a \xff")).mkdir()
    (folder / "manifest.json").write_text("{}")
    with pytest.raises(BundleError, match="the path is not UTF-8"):
        named([str(folder)])
