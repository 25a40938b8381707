"""A manifest whose parts contradict each other is refused, each fault by its own line."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftwood.errors import BundleError
from draftwood.manifest import read_manifest
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.bundle.references import faults


def changed(bundle: Path, tmp_path: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """A copy of the bundle whose manifest is changed."""
    copy = Path(shutil.copytree(bundle, tmp_path / "copy"))
    manifest = json.loads((copy / "manifest.json").read_text())
    change(manifest)
    (copy / "manifest.json").write_text(json.dumps(manifest))
    return copy


def graphs_of(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    return manifest["graph_sets"][0]["graphs"]


def graph(manifest: dict[str, Any], name: str) -> dict[str, Any]:
    return next(graph for graph in graphs_of(manifest) if graph["name"] == name)


def end(manifest: dict[str, Any], name: str, tensor: str) -> dict[str, Any]:
    found = graph(manifest, name)
    return next(spec for spec in (*found["inputs"], *found["outputs"]) if spec["name"] == tensor)


FAULTS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "unlisted tree": (lambda m: m["files"].pop("trees/ragged.json"), "refers to trees/ragged.json.*not list"),
    "unlisted graph": (lambda m: graph(m, "step").update(file="onnx/other.onnx"), "refers to onnx/other.onnx"),
    "unlisted weights": (lambda m: m["graph_sets"][0].update(weights="weights.bin"), "refers to weights.bin"),
    "two sets": (lambda m: m["graph_sets"].append(m["graph_sets"][0]), "two graph sets are of onnx, rank 0"),
    "no set": (lambda m: m.update(graph_sets=[]), "has no gear or no graph"),
    "no graphs": (lambda m: m["graph_sets"][0].update(graphs=[]), "onnx, rank 0, has no graphs"),
    "rank": (lambda m: m["graph_sets"][0].update(rank=1), "rank 1 of 1; expected 0 to 0"),
    "itself": (lambda m: m["files"].update({"manifest.json": {"bytes": 1, "sha256": "0" * 64}}), "lists manifest.json"),
    "two trees": (lambda m: m["trees"].append(m["trees"][-1]), "two trees are named 'ragged'"),
    "two gears": (lambda m: m["gears"].append(m["gears"][0]), "two gears are named 'plain-kv128'"),
    "two graphs": (lambda m: graphs_of(m).append(graphs_of(m)[0]), "two graphs are named"),
    "no gears": (lambda m: m.update(gears=[]), "has no gear"),
    "no plain gear": (lambda m: m["gears"].pop(0), "no gear decodes plainly at KV length 128"),
    "no plain": (lambda m: m["trees"].pop(0), "has no tree 'plain'"),
    "branch rows": (lambda m: m["dims"].update(branch_rows=2**30), "branch_rows is 1073741824; expected 7"),
    "path rows": (lambda m: m["dims"].update(path_rows=2), "path_rows is 2; expected 3"),
    "context": (lambda m: m["dims"].update(context=256), "context is 256; expected less than 256"),
    "fewer buffers": (
        lambda m: m["teacher"]["buffers"].pop(),
        "caches .*value_cache.1.*; expected .*key_cache.1.]",
    ),
    "no buffers": (lambda m: m["teacher"].update(buffers=[]), "the teacher has no buffers"),
    "two buffers": (lambda m: m["teacher"]["buffers"].append(m["teacher"]["buffers"][0]), "two buffers are named"),
    "width": (lambda m: m["teacher"]["buffers"][1].update(width=2**20), "value_cache.0 .*elements"),
    "heads": (lambda m: m["teacher"]["buffers"][0].update(heads=1), "key_cache.0 .*elements"),
    "vocabulary": (lambda m: m["dims"].update(vocabulary=299), r"logits float32 \[3, 300\]; expected \[3, 299\]"),
    "query heads": (lambda m: m["dims"].update(heads=8), r"results int64 .*expected int64 \['T', 8, 3\]"),
    "eos": (lambda m: m["teacher"].update(eos=[300]), "token 300 begins or ends a text; expected ids below 300"),
    "gear's tree": (lambda m: m["gears"][0].update(tree="nowhere"), "refers to tree 'nowhere'"),
    "gear's graph": (lambda m: m["gears"][0].update(graph="nowhere"), "graph 'nowhere', which the manifest"),
    "gear's kind": (lambda m: m["gears"][0].update(graph="step"), "is of kind step.*expected decode"),
    "gear's slots": (lambda m: m["gears"][0].update(slots=2**30), "expected decode, 1 and 1073741824"),
    "gear's draft": (lambda m: m["gears"][-1].update(draft="nowhere"), "refers to draft graph 'nowhere'"),
    "no draft": (lambda m: m["gears"][-1].update(draft=None), "draft is None next to a tree of 7 rows"),
    "plain draft": (lambda m: m["gears"][0].update(draft="draft"), "draft is 'draft' next to a tree of 1 rows"),
    "no drafter": (lambda m: m.update(drafter=None), "drafts, but the manifest has no drafter"),
    "prompt of any size": (
        lambda m: graph(m, "step").update(kind="prefill"),
        "has sizes that are chosen at run time",
    ),
    "levels": (lambda m: m["drafter"].update(levels=3), r"candidates .*expected int64 \[3, 10\]"),
    "features": (lambda m: m["drafter"].update(features=63), r"features .*expected \[3, 63\]"),
    "alias": (lambda m: graph(m, "step")["aliases"].update({"logits": "tokens"}), "alias logits -> tokens: logits"),
    "alias to nothing": (lambda m: graph(m, "step")["aliases"].update({"x": "tokens"}), "expected an output and an"),
    "alias twice": (lambda m: graph(m, "step")["aliases"].update({"logits": "key_cache.0"}), "two outputs are written"),
    "alias dtype": (lambda m: end(m, "step", "key_cache.0").update(dtype="float16"), "alias key_cache.0.out"),
    "input": (lambda m: end(m, "step", "bias").update(name="mask"), "takes .*mask.* besides caches"),
    "output": (lambda m: end(m, "step", "choice").update(name="chosen"), "gives .*chosen.* besides caches"),
    "same name": (lambda m: end(m, "step", "bias").update(name="total"), "named 'total'"),
    "run-time size": (lambda m: end(m, "decode-kv128", "tokens").update(shape=["T"]), "has sizes that are chosen"),
    "half an acceptance": (
        lambda m: graphs_of(m).append(graph(m, "decode-kv128") | {"kind": "accept", "name": "a"}),
        "expected two graphs that accept 1 rows, greedy and sampled, got 1",
    ),
    "rows": (lambda m: end(m, "verify-t7-kv128", "tokens").update(shape=[8]), "tokens int64 .8.; expected int64 .7."),
    "type": (lambda m: end(m, "step", "last").update(dtype="int64"), "last int64 .1.; expected int32 .1."),
    "small candidates": (lambda m: m["trees"][-1].update(width=11, file=None), "a tree exactly where it has no file"),
    "noise": (lambda m: end(m, "draft", "noise").update(shape=[1, 300]), "takes noise .*expected a row for each of 2"),
    "budget": (lambda m: m["trees"][1].update(rows=2**20, file=None), "a budget of 1048575 nodes; expected 1 to"),
    "shares": (
        lambda m: m.update(
            planning={"greedy": {"reached": {"ragged": [0.5]}, "first": 0.5}, "sampled": None, "times": []}
        ),
        "planning: 1 shares of tree ragged; expected 2, one a level",
    ),
    "tree's rows": (lambda m: m["trees"][1].update(depth=1, rows=3, width=2), "rows, depth and width .3, 2, 1."),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named(name: str, tiny_bundle: Path, tmp_path: Path) -> None:
    change, message = FAULTS[name]
    copy = changed(tiny_bundle, tmp_path, change)
    with pytest.raises(BundleError) as caught:
        Bundle.open(copy, "fast")
    found = [str(caught.value), *faults(read_manifest(copy))]
    import re

    assert any(re.search(message, line) for line in found), found
    assert str(caught.value).startswith(str(copy))


def test_what_a_build_writes_has_no_fault(tiny_bundles: dict[str, Path]) -> None:
    for folder in tiny_bundles.values():
        assert list(faults(read_manifest(folder))) == []


@pytest.mark.parametrize(
    ("tensor", "size", "message"),
    [("parents", 8, "parents int64"), ("paths", 5, "paths int64"), ("drafted", 7, "drafted int64")],
)
def test_a_draft_of_another_tree_is_refused(
    tensor: str, size: int, message: str, tiny_draft_bundles: dict[str, Path], tmp_path: Path
) -> None:
    def change(manifest: dict[str, Any]) -> None:
        end(manifest, "draft-budget", tensor)["shape"][-1] = size

    copy = changed(tiny_draft_bundles["eagle3"], tmp_path, change)
    with pytest.raises(BundleError, match=f"graph draft-budget gives {message}.* for tree budget"):
        Bundle.open(copy, "fast")


def test_drafts_have_both_forms(tiny_draft_bundles: dict[str, Path], tmp_path: Path) -> None:
    """A static one at every KV length, and one of any size; caches go with a KV length."""

    def without(name: str) -> Callable[[dict[str, Any]], None]:
        return lambda m: graphs_of(m).remove(graph(m, name))

    for number, (change, message) in enumerate(
        (
            (without("draft-planned-kv128"), "no static graph draft-planned of KV length 128"),
            (without("draft-planned"), "no graph draft-planned of any size; expected one besides the step"),
            (lambda m: graph(m, "draft-planned-kv128").update(slots=0), "and no KV length; expected both or neither"),
            (lambda m: end(m, "extend-t16-kv128", "tokens").update(shape=["T"]), "has sizes that are chosen at run"),
        )
    ):
        copy = changed(tiny_draft_bundles["eagle3"], tmp_path / str(number), change)
        assert any(message in fault for fault in faults(read_manifest(copy)))


def test_rotary_tables_shorter_than_the_cache_are_refused(tiny_bundle: Path, tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    from draftwood.manifest import list_file

    copy = changed(tiny_bundle, tmp_path, lambda _: None)
    path = copy / "onnx" / "weights.safetensors"
    tensors = load_file(path)
    save_file(tensors | {"rope_cos": tensors["rope_cos"][:100]}, path)
    manifest, listed = json.loads((copy / "manifest.json").read_text()), list_file(path)
    manifest["files"]["onnx/weights.safetensors"] = {"bytes": listed.bytes, "sha256": listed.sha256}
    (copy / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match=r"rope_cos has shape \[100, 16\]; expected 256 positions or more"):
        Bundle.open(copy)


def test_a_draft_of_several_texts_is_held_to_that_of_one(tiny_draft_bundles: dict[str, Path], tmp_path: Path) -> None:
    def change(manifest: dict[str, Any]) -> None:
        end(manifest, "draft-planned-b2", "text1.drafted")["shape"] = [7]

    with pytest.raises(BundleError, match="graph draft-planned-b2: serves 2 texts; expected 2 or more"):
        Bundle.open(changed(tiny_draft_bundles["eagle3"], tmp_path, change), "fast")
