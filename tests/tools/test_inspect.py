"""Output of `draftwood inspect` for trees and bundles."""

import json
import re
import shutil
from pathlib import Path

import pytest

import draftwood
from draftwood.tests.fixtures import MEDUSA, counted
from draftwood.tests.gguf_files import save_gguf
from draftwood.tests.packed_checkpoints import save_packed
from draftwood.tests.tree_texts import written
from draftwood.tools.cli import main
from draftwood.trees import Topology
from draftwood.trees.plan_file import Limits, format_plan

TREE = Topology.from_paths([(0,), (1,), (0, 0)])
DRAWING = """\
4 rows, depth 2, width 2
root         depth 0
├─ (0,)      depth 1
│  └─ (0, 0) depth 2
└─ (1,)      depth 1
"""


def show(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict:
    assert main(["inspect", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_tree_as_text(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "small.json").write_text(written(TREE, "medusa"))
    assert main(["inspect", str(tmp_path / "small.json")]) == 0
    out = capsys.readouterr().out
    assert out.startswith("tree          small\nnodes         3 (root not counted), by depth: 2 1\n")
    assert "invariants    all hold" in out
    assert out.endswith(DRAWING)


@pytest.mark.parametrize("form", ["draftwood", "medusa", "tuples", "nxdi"])
def test_every_form_of_file(form: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "tree.txt").write_text(written(TREE, form))
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


def test_a_bundle_as_json(tiny_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = show(capsys, tiny_bundle)
    assert found == show(capsys, tiny_bundle / "manifest.json")
    weights, step = (tiny_bundle / "onnx" / name for name in ("weights.safetensors", "step.onnx"))
    assert found["weights"] == {"file": "onnx/weights.safetensors", "bytes": weights.stat().st_size}
    assert found["files_verified"] == len(json.loads((tiny_bundle / "manifest.json").read_text())["files"])
    facts = {"name": "step", "kind": "step", "rows": 0, "slots": 0, "file": "onnx/step.onnx"}
    assert facts | {"texts": 1, "bytes": step.stat().st_size} in found["graphs"]
    assert {graph["texts"] for graph in found["graphs"] if graph["kind"] == "batch"} == {2, 4}
    assert all(gear["texts"] == [1, 2, 4] for gear in found["gear_figures"])
    assert [tree["name"] for tree in found["trees"]] == ["plain", "chain-2", "ragged"]
    assert found["engines"] == ["cpu", "bitwise", "static", "openvino", "openvino-gpu", "openvino-npu", "qnn"]


def test_a_bundle_as_text(tiny_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(tiny_bundle)]) == 0
    out = capsys.readouterr().out
    assert " verified, " in out
    assert re.search("^  ragged-kv128 +ragged +7 +128 +120 +1,2,4 +- +- .*verify-t7-kv128$", out, re.M)


def test_a_drafter_with_caches_as_text(tiny_draft_bundles: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(tiny_draft_bundles["eagle3"])]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^  buffers +draft_key_cache\.0 \d+ x \d+, draft_value_cache\.0 \d+ x \d+$", out, re.M)


@pytest.mark.parametrize(
    ("subject", "says"),
    [
        ("nowhere", "no such file or folder"),
        ("full:0", "whole numbers from 1"),
        ("chain:1000000", "from 1 to 999999"),
        ("lookup:lookup:chain:3", "lookup: stands twice"),
        ("round:3", "unknown kind 'round'"),
        ("chain:1,chain:2", "expected one"),
        (".", "expected a bundle, as draftwood make or draftwood build writes it"),
        ("x" * 300, "cannot be opened"),
        ("/dev/null", "a device, expected a regular file"),
    ],
    ids=[
        "no such file",
        "zero",
        "million",
        "twice",
        "unknown kind",
        "two trees",
        "not a bundle",
        "name too long",
        "device",
    ],
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


def test_a_plan_of_several_trees_is_not_shown_as_its_last(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = draftwood.plan(counted(MEDUSA), Limits(4))
    (tmp_path / "plan.json").write_text(format_plan(plan))
    assert main(["inspect", f"plan:{tmp_path / 'plan.json'}"]) == 2
    assert "names 3 trees, planned-5, planned-3, planned-2; expected one" in capsys.readouterr().err


def test_a_damaged_bundle(tiny_bundle: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    copy = shutil.copytree(tiny_bundle, tmp_path / "copy")
    (copy / "onnx" / "step.onnx").write_text("x" * 100)
    assert main(["inspect", str(copy)]) == 2
    assert "step.onnx: altered or truncated" in capsys.readouterr().err


def told(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, str]:
    """The command's lines for people, by the words on the left."""
    assert main(["inspect", *map(str, arguments)]) == 0
    _, *lines = capsys.readouterr().out.splitlines()
    return dict(re.split(r"  +", line.strip(), maxsplit=1) for line in lines)


def test_a_teacher_without_weights(capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, "shape:qwen3-8b")
    assert found["family"] == "qwen3" and found["parameters"] == "8,190,735,360, bfloat16"
    assert found["heads"] == "32 query, 8 key/value, 128 wide, q and k normalised"
    assert found["rope"] == "default, base 1e+06" and found["cache"] == "144 KiB a slot in bfloat16"
    assert found["weights"].startswith("none here") and found["tokenizer"].startswith("none")
    assert told(capsys, "shape:qwen2.5-7b")["biases on"] == "q, k, v"
    assert told(capsys, "shape:llama-3.1-8b")["rope"] == "llama3, base 500000, stretched 8 times of 8192 tokens"


def test_a_teacher_with_weights_and_tokenizer(tiny_teacher: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = show(capsys, tiny_teacher)
    assert (found["kind"], found["family"], found["layers"], found["dtype"]) == ("teacher", "llama", 2, "float32")
    stored = sum(file.stat().st_size for file in tiny_teacher.glob("*.safetensors"))
    assert found["weights"] == {"tensors": 21, "files": 1, "bytes": stored}
    assert found["tokenizer"]["chat"] and found["tokenizer"]["tokens"] <= found["vocabulary"] == 300
    assert found["cache_bytes_a_slot"] == 2 * 2 * 2 * 16 * 4
    none = dict.fromkeys(("kept", "four_bits", "eight_bits", "w8a8"), 0)
    assert found["precisions"] == {
        "nbits": none | {"four_bits": 14, "eight_bits": 1},
        "w8a8": none | {"w8a8": 14, "eight_bits": 1},
        "nbits8": none | {"eight_bits": 15},
    }
    assert told(capsys, tiny_teacher)["ends a text"] == "1"


def test_a_teacher_by_the_file_that_describes_it(tiny_teacher: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It was taken for a tree's file."""
    assert main(["inspect", str(tiny_teacher / "config.json")]) == 0
    assert capsys.readouterr().out.startswith(f"teacher {tiny_teacher}\n")


def test_yarn_says_what_it_does(tiny_teacher: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    fields = json.loads((tiny_teacher / "config.json").read_text())
    fields["rope_scaling"] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    found = told(capsys, tmp_path)
    assert found["rope"] == "yarn, base 10000, stretched 4 times of 512 tokens, attention times 1.139"
    assert found["context"] == "2048 tokens"


def test_a_drafter_beside_its_teacher(
    tiny_teacher: Path, tiny_drafters: dict[str, Path], tiny_heads: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for kind, folder in tiny_drafters.items():
        found = show(capsys, folder, tiny_teacher)
        assert (found["kind"], found["drafter"], found["aux_layers"]) == ("drafter", kind, [0, 1, 2])
        assert told(capsys, folder, tiny_teacher)["reads"] == "the states entering layers 0, 1, 2"
        assert told(capsys, folder)["next"].startswith("inspect DRAFTER TEACHER")
    assert told(capsys, tiny_heads, tiny_teacher)["reads"] == "the state after the last norm"
    assert told(capsys, tiny_heads / "medusa_lm_head.safetensors")["kind"] == "medusa: Medusa heads"


@pytest.mark.parametrize(
    ("fields", "arguments", "says"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            (),
            "architectures is ['GPT2LMHeadModel']; expected one",
        ),
        ({"mlp_bias": True}, (), "mlp_bias is True; expected False"),
        ({}, ("--npu",), "--npu: .* is a checkpoint, which holds no graphs"),
        ({}, ("shape:qwen3-8b",), "no EAGLE-3 drafter; expected a folder with"),
    ],
    ids=["family", "field", "graphs", "no drafter"],
)
def test_a_checkpoint_that_is_beyond_us(
    fields: dict,
    arguments: tuple[str, ...],
    says: str,
    tiny_teacher: Path,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    known = json.loads((tiny_teacher / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(known | fields))
    assert main(["inspect", str(tmp_path), *arguments]) == 2
    err = capsys.readouterr().err
    assert (says in err or re.search(says, err)) and err.count("\n") == 1


def test_a_model_goes_with_a_drafter_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "full:2x2", "demo"]) == 2
    assert "goes with a drafter's checkpoint, which full:2x2 is not" in capsys.readouterr().err


def test_a_four_bit_teacher_says_which_matrices_are_packed(
    tiny_teacher: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers = save_packed(tiny_teacher, tmp_path / "packed", "gptq")
    (packed,) = show(capsys, tmp_path / "packed")["packed"]
    assert set(packed.pop("modules")) == set(numbers)
    assert packed == {"layout": "GPTQ v1", "bits": 4, "group": 32, "rounded": False}
    assert main(["inspect", str(tmp_path / "packed")]) == 0
    assert re.search(r"4 bits +GPTQ v1, groups of 32: .*2 down_proj", capsys.readouterr().out)


def test_a_gguf_file_is_a_teacher(tiny_teacher: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_gguf(tiny_teacher, tmp_path / "model.gguf", "Q4_1")
    for subject in (tmp_path / "model.gguf", tmp_path):
        found = show(capsys, subject)
        assert (found["family"], found["packed"][0]["layout"], found["weights"]["files"]) == ("llama", "GGUF Q4_1", 1)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert main(["inspect", str(tmp_path)]) == 2
    assert "the version takes 4 bytes at byte 4; expected at most the 0 that are left" in capsys.readouterr().err
