"""Only regular files inside the bundle, each with its size and digest; nothing else besides them."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from draftwood.errors import BundleError
from draftwood.manifest import encode, list_file, read_manifest
from draftwood.runtime.bundle import Bundle


@pytest.fixture
def copy(tiny_bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_bundle, tmp_path / "copy"))


def vouch_for(bundle: Path, *names: str) -> Path:
    """The bundle, its manifest rewritten to list these files as they are."""
    import msgspec

    manifest = read_manifest(bundle)
    files = manifest.files | {name: list_file(bundle / name) for name in names}
    (bundle / "manifest.json").write_bytes(encode(msgspec.structs.replace(manifest, files=files)))
    return bundle


@pytest.mark.parametrize("name", ["manifest.json", "onnx/step.onnx", "trees/ragged.json", "onnx/weights.safetensors"])
@pytest.mark.parametrize("kind", ["fifo", "folder", "device", "dangling", "out", "loop"])
def test_what_is_no_file_of_the_bundle_is_refused_and_never_blocks(copy: Path, name: str, kind: str) -> None:
    path, outside = copy / name, copy.parent / "outside"
    shutil.move(path, outside)
    targets = {"device": "/dev/zero", "dangling": "nowhere", "out": outside, "loop": path.name}
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(targets[kind])
    if (name, kind) == ("manifest.json", "out"):
        return  # the manifest may lie anywhere: its content is checked, not its place
    with pytest.raises(BundleError, match=r"link|missing|regular|device|FIFO|folder|No such file"):
        Bundle.open(copy)


def test_a_link_inside_the_bundle_is_a_file_of_it(copy: Path) -> None:
    (copy / "onnx" / "step.onnx").rename(copy / "step.onnx")
    (copy / "onnx" / "step.onnx").symlink_to("../step.onnx")
    assert Bundle.open(copy, "full").verified == "full"


@pytest.mark.parametrize("name", ["tokenizer/chat_template.jinja", "onnx/extra.bin", "trees/deep/er.json"])
def test_a_file_in_a_folder_that_nobody_vouches_for_is_refused(copy: Path, name: str) -> None:
    (copy / name).parent.mkdir(exist_ok=True)
    (copy / name).write_text("surprise")
    with pytest.raises(BundleError, match=f"{name}: the manifest does not list it.*remove it"):
        Bundle.open(copy)


def test_what_lies_at_the_top_or_was_compiled_from_the_bundle_is_not_looked_at(copy: Path) -> None:
    (copy / "npu" / "om").mkdir(parents=True)
    for name in ("check.json", "README.md", "npu/om/step.om"):
        (copy / name).write_text("mine")
    assert Bundle.open(copy)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_weight_that_is_not_finite_is_named(copy: Path, value: float) -> None:
    path = copy / "onnx" / "weights.safetensors"
    tensors = load_file(path)
    tensors["layers.1.down.weight"][3, 5] = value
    save_file(tensors, path)
    with pytest.raises(BundleError, match=r"layers\.1\.down\.weight\[3, 5\] is no finite number"):
        Bundle.open(vouch_for(copy, "onnx/weights.safetensors"))
    assert Bundle.open(copy, "fast")


@pytest.mark.parametrize("dtype", [np.float16, np.float64, "bfloat16"])
def test_every_floating_point_type_is_looked_at(tmp_path: Path, dtype: object) -> None:
    import torch
    from safetensors.torch import save_file

    from draftwood.runtime.bundle.weights import check_values, read_header

    kind = torch.bfloat16 if dtype == "bfloat16" else torch.from_numpy(np.zeros(1, dtype)).dtype
    good = {"a": torch.full((3,), torch.finfo(kind).max, dtype=kind), "ids": torch.full((2,), 8)}
    save_file(good, tmp_path / "good.safetensors")
    check_values(tmp_path / "good.safetensors", read_header(tmp_path / "good.safetensors"), 9)
    save_file(good | {"b": torch.tensor([0.0, torch.inf]).to(kind)}, tmp_path / "bad.safetensors")
    with pytest.raises(BundleError, match=r"b\[1\] is no finite number"):
        check_values(tmp_path / "bad.safetensors", read_header(tmp_path / "bad.safetensors"), 9)


def npu_weights(tmp_path: Path, change: dict[str, object], value: float = 1.0) -> dict:
    """The result of reading an NPU's index, one field of a constant changed."""
    import json

    import torch

    from draftwood.compiler.ge.weights import plan_weights, write_index, write_npu_weights
    from draftwood.runtime.bundle.weights import read_index

    index = plan_weights({"a": (2, 3)}, torch.bfloat16, "weights.bin", {}, {})
    write_index(tmp_path / "weights.json", index)
    write_npu_weights(tmp_path / "weights.bin", index, lambda _: torch.full((2, 3), value))
    fields = json.loads((tmp_path / "weights.json").read_text())
    fields["constants"]["a"] |= change
    (tmp_path / "weights.json").write_text(json.dumps(fields))
    return read_index(tmp_path / "weights.json", tmp_path / "weights.bin")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"location": "../weights.bin"}, r"a lies in '\.\./weights\.bin'; expected 'weights.bin'"),
        ({"length": 14}, r"a: 14 bytes do not fit \[2, 3\]"),
        ({"offset": -1}, "no weight index .*>= 0"),
        ({"dtype": "float33"}, "do not fit"),
    ],
)
def test_an_index_that_contradicts_itself_is_refused(change: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=message):
        npu_weights(tmp_path, change)


def test_the_weights_of_an_npu_are_finite_and_there(tmp_path: Path) -> None:
    from draftwood.runtime.bundle.weights import check_values

    (held,) = npu_weights(tmp_path, {}).items()
    check_values(*held, 9)
    (held,) = npu_weights(tmp_path, {}, float("inf")).items()
    with pytest.raises(BundleError, match=r"weights.bin: a\[0, 0\] is no finite number"):
        check_values(*held, 9)
    (held,) = npu_weights(tmp_path, {"offset": 2**40}).items()
    with pytest.raises(BundleError, match="ends inside a"):
        check_values(*held, 9)


@pytest.mark.parametrize("token", [-1, 300, -(2**62)])
def test_a_map_into_no_vocabulary_is_refused(token: int, tiny_draft_bundles: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_draft_bundles["eagle3"], tmp_path / "copy"))
    path = folder / "onnx" / "weights.safetensors"
    tensors = load_file(path)
    tensors["teacher_ids"][7] = token
    save_file(tensors, path)
    with pytest.raises(BundleError, match=r"teacher_ids\[7\] is no token id below 300"):
        Bundle.open(vouch_for(folder, "onnx/weights.safetensors"))
