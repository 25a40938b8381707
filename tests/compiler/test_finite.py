"""A weight that is not a number is refused by its name, and a build that cannot be written leaves nothing."""

import resource
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftwood.compiler.bundle.build import build
from draftwood.compiler.bundle.request import BuildRequest
from draftwood.compiler.checkpoints.safetensors_file import is_finite
from draftwood.compiler.checkpoints.tensors import open_tensors
from draftwood.errors import CheckpointError
from draftwood.tools.cli import main
from draftwood.trees import Topology

TREES = (("plain", Topology.plain()), ("chain", Topology.chain(2)))


@pytest.fixture
def request_(tiny_teacher: Path, tiny_heads: Path, tmp_path: Path) -> BuildRequest:
    """Copies of a teacher and of its heads, to be spoilt."""
    model, drafter = tmp_path / "model", tmp_path / "heads"
    for source, folder in ((tiny_teacher, model), (tiny_heads, drafter)):
        folder.mkdir()
        for path in source.iterdir():
            (folder / path.name).write_bytes(path.read_bytes())
    return BuildRequest(model=model, drafter=drafter, trees=TREES, slots=(128,), prefill_rows=(8,))


def spoil(file: Path, name: str, value: float) -> None:
    tensors = load_file(file)
    tensors[name].view(-1)[5] = value
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=str)
@pytest.mark.parametrize("whose", ["teacher", "drafter"])
def test_refused_by_name_before_anything_is_left(
    request_: BuildRequest, tmp_path: Path, whose: str, value: float
) -> None:
    file, name = {
        "teacher": (request_.model / "model.safetensors", "model.layers.1.self_attn.k_proj.weight"),
        "drafter": (request_.drafter / "medusa_lm_head.safetensors", "1.0.linear.weight"),
    }[whose]
    spoil(file, name, value)
    with pytest.raises(CheckpointError, match=rf"{file}: {name} holds {value} at \[0, 5\], 1 such of \d+;") as caught:
        build(request_, tmp_path / "out" / "bundle")
    assert "\n" not in str(caught.value) and list((tmp_path / "out").iterdir()) == []


def test_weights_that_stay_where_they_lie_are_read_too(request_: BuildRequest, tmp_path: Path) -> None:
    from draftwood.environment import torch_npu_installed

    if not torch_npu_installed():
        pytest.skip("needs the torch_npu package, which holds torchair's converters")
    file = request_.model / "model.safetensors"
    save_file({n: t.bfloat16() for n, t in load_file(file).items()}, file, metadata={"format": "pt"})
    spoil(file, "model.layers.0.mlp.down_proj.weight", float("nan"))
    linked = replace(request_, drafter=None, trees=TREES[:1], prefill_rows=(), targets=("ge",), weights="link")
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.down_proj\.weight holds nan"):
        build(linked, tmp_path / "out" / "bundle")
    assert list((tmp_path / "out").iterdir()) == []


def test_torch_files_are_held_to_the_same(tmp_path: Path) -> None:
    torch.save({"good": torch.ones(3), "bad": torch.tensor([1.0, float("nan")])}, tmp_path / "heads.pt")
    _, read = open_tensors(tmp_path / "heads.pt")
    assert torch.equal(read("good"), torch.ones(3))
    with pytest.raises(CheckpointError, match=r"heads\.pt: bad holds nan at \[1\], 1 such of 2"):
        read("bad")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_finite(dtype: torch.dtype) -> None:
    assert is_finite(torch.full((3, 2), torch.finfo(dtype).max, dtype=dtype)) and is_finite(torch.empty(0, dtype=dtype))
    for value in ("nan", "inf", "-inf"):
        assert not is_finite(torch.tensor([1.0, float(value), 2.0], dtype=dtype))
    assert is_finite(torch.tensor([1, 2])) and is_finite(torch.tensor([True]))


def test_a_full_disk_is_one_line_and_leaves_nothing(
    tiny_teacher: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Files may not grow past this many bytes, as on a disk that is full."""
    (tmp_path / "at").mkdir()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        code = main(["build", str(tiny_teacher), "--kv", "128", "--out", str(tmp_path / "at" / "bundle")])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    errors = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("building ")]
    assert code == 2 and len(errors) == 1 and "cannot be written ([Errno 27]" in errors[0]
    assert list((tmp_path / "at").iterdir()) == []
