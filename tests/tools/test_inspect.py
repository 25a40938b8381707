"""What `draftwood inspect` shows of trees and bundles."""

import hashlib
import json
from pathlib import Path

import pytest

from draftwood import manifest as m
from draftwood.tools.cli import main
from draftwood.trees import Topology, write_tree
from draftwood.trees.frozen import freeze

TREE = Topology.from_paths([(0,), (1,), (0, 0)])
DRAWING = """\
4 rows, depth 2, width 2
root         depth 0
├─ (0,)      depth 1
│  └─ (0, 0) depth 2
└─ (1,)      depth 1
"""
PNG = b"\x89PNG\r\n\x1a\n"


def show(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict:
    assert main(["inspect", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """As small as a bundle can be that opens; its graphs are never run."""
    folder = tmp_path / "bundle"
    contents = {"weights.bin": "w" * 100, "g.onnx": "graph", "trees/a.json": freeze(TREE)}
    contents["trees/plain.json"] = freeze(Topology.plain())
    for name, text in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    dims = m.Dims(
        **dict.fromkeys(("layers", "hidden", "heads", "kv_heads", "head_dim", "vocabulary"), 8),
        branch_rows=4,
        path_rows=3,
        context=127,
    )
    trees = [("plain", Topology.plain()), ("a", TREE)]
    manifest = m.Manifest(
        schema_version=m.SCHEMA_VERSION,
        dims=dims,
        teacher=m.Teacher(digest="0" * 64, bos=None, eos=(1,), config={}),
        drafter=None,
        trees=tuple(
            m.Tree(name=name, file=f"trees/{name}.json", rows=tree.rows, depth=tree.depth, width=tree.width)
            for name, tree in trees
        ),
        gears=(m.Gear(name="a-kv128", tree="a", slots=128, graph="g", draft=None),),
        graph_sets=(
            m.GraphSet(
                target="onnx",
                rank=0,
                ranks=1,
                precision=m.Precision(name="fp32", weights="float32", activations="float32", caches="float32"),
                weights="weights.bin",
                index=None,
                soc=None,
                graphs=(
                    m.GraphSignature(
                        name="g", kind="verify", file="g.onnx", rows=4, slots=128, inputs=(), outputs=(), aliases={}
                    ),
                ),
            ),
        ),
        tokenizer=False,
        provenance={"draftwood": "0"},
        files={name: hashlib.sha256(text.encode()).hexdigest() for name, text in contents.items()},
    )
    (folder / m.MANIFEST_FILE).write_bytes(m.encode(manifest))
    return folder


def test_a_tree_as_text(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "small.json").write_text(write_tree(TREE, "medusa"))
    assert main(["inspect", str(tmp_path / "small.json")]) == 0
    out = capsys.readouterr().out
    assert out.startswith("tree          small\nnodes         3 (root not counted), by depth: 2 1\n")
    assert "invariants    all hold" in out
    assert out.endswith(DRAWING)


@pytest.mark.parametrize("form", ["draftwood", "medusa", "tuples", "nxdi"])
def test_every_form_of_file(form: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "tree.txt").write_text(write_tree(TREE, form))
    found = show(capsys, tmp_path / "tree.txt")
    assert (found["rows"], found["nodes"], found["depth"], found["leaves"]) == (4, 3, 2, 2)
    assert sorted(found["rank_paths"]) == [[0], [0, 0], [1]]
    assert found["invariants_hold"]


@pytest.mark.parametrize(
    ("spec", "name", "rows"),
    [("plain", "plain", 1), ("full:3x2", "full-3x2", 10), ("backbone:4:5", "backbone-4-5", 21)],
)
def test_a_tree_by_its_spec(spec: str, name: str, rows: int, capsys: pytest.CaptureFixture[str]) -> None:
    found = show(capsys, spec)
    assert (found["name"], found["rows"]) == (name, rows)


def test_a_tree_as_a_picture(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    show(capsys, "full:2x2", "--png", tmp_path / "tree.png")
    assert (tmp_path / "tree.png").read_bytes().startswith(PNG)


def test_a_bundle_as_json(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = show(capsys, bundle)
    assert found == show(capsys, bundle / "manifest.json")
    assert found["weights"] == {"file": "weights.bin", "bytes": 100}
    assert found["files_verified"] == 4
    assert found["graphs"] == [{"name": "g", "kind": "verify", "rows": 4, "slots": 128, "file": "g.onnx", "bytes": 5}]
    assert [tree["name"] for tree in found["trees"]] == ["plain", "a"]


def test_a_bundle_as_text_and_picture(bundle: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["inspect", str(bundle), "--png", str(tmp_path / "trees.png")]) == 0
    out = capsys.readouterr().out
    assert "files    4 verified" in out
    assert "  a-kv128  a     128    g\n" in out
    assert (tmp_path / "trees.png").read_bytes().startswith(PNG)


@pytest.mark.parametrize(
    ("subject", "says"),
    [
        ("nowhere", "no such file or folder"),
        ("full:0", "whole numbers from 1"),
        ("round:3", "unknown kind 'round'"),
        ("chain:1,chain:2", "expected one"),
        (".", "expected a folder made by draftwood build"),
        ("x" * 300, "cannot be opened"),
    ],
    ids=["no such file", "zero", "unknown kind", "two trees", "not a bundle", "name too long"],
)
def test_what_cannot_be_inspected(
    subject: str,
    says: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["inspect", subject]) == 2
    err = capsys.readouterr().err
    assert says in err
    assert err.count("\n") == 1


def test_a_damaged_bundle(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (bundle / "weights.bin").write_text("x" * 100)
    assert main(["inspect", str(bundle)]) == 2
    assert "weights.bin: altered or truncated" in capsys.readouterr().err


def test_a_picture_that_cannot_be_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["inspect", "plain", "--png", str(tmp_path / "no" / "tree.png")]) == 2
    assert "cannot be written: No such file" in capsys.readouterr().err
