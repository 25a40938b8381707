"""The weights file: plain safetensors, written in order, with offsets that ONNX can point at."""

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from draftwood.compiler.checkpoints.safetensors_file import map_tensors
from draftwood.compiler.checkpoints.weight import WeightEntry
from draftwood.compiler.onnx.weights import write_weights

TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).view(2, 3),
    "b.bias": torch.tensor([1.5, -2.0]).bfloat16(),
    "c": torch.tensor([[0.25]]).half(),
}


def entries(tensors: dict[str, Tensor], note: Callable[[str], None] = lambda _: None) -> list[WeightEntry]:
    def reader(name: str) -> Callable[[], Tensor]:
        return lambda: (note(name), tensors[name])[1]

    return [WeightEntry(name, tuple(tensor.shape), reader(name)) for name, tensor in tensors.items()]


def test_any_library_reads_the_file(tmp_path: Path) -> None:
    write_weights(tmp_path / "w", entries(TENSORS))
    loaded = load_file(tmp_path / "w")
    assert list(loaded) == list(TENSORS)
    for name, tensor in TENSORS.items():
        assert loaded[name].dtype == torch.float32 and torch.equal(loaded[name], tensor.float())


def test_spans_point_at_the_values(tmp_path: Path) -> None:
    spans = write_weights(tmp_path / "w", entries(TENSORS))
    content = (tmp_path / "w").read_bytes()
    for name, span in spans.items():
        values = np.frombuffer(content[span.offset : span.offset + span.length], "<f4").reshape(span.shape)
        assert np.array_equal(values, TENSORS[name].float())
    assert [span.offset - 4096 for span in spans.values()] == [0, 24, 32]
    assert len(content) == 4096 + 36


def test_the_header_ends_on_a_page(tmp_path: Path) -> None:
    many = {f"layer.{i}.weight": torch.zeros(2) for i in range(200)}
    spans = write_weights(tmp_path / "w", entries(many))
    (length,) = struct.unpack("<Q", (tmp_path / "w").read_bytes()[:8])
    assert (8 + length) % 4096 == 0 and length > 4096
    assert spans["layer.0.weight"].offset == 8 + length


def test_tensors_are_read_one_at_a_time_in_order(tmp_path: Path) -> None:
    seen: list[str] = []
    write_weights(tmp_path / "w", entries(TENSORS, seen.append))
    assert seen == list(TENSORS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_other_dtypes(tmp_path: Path, dtype: torch.dtype) -> None:
    spans = write_weights(tmp_path / "w", entries(TENSORS), dtype)
    assert torch.equal(load_file(tmp_path / "w")["a"], TENSORS["a"].to(dtype))
    assert spans["a"].length == 12


def test_a_strided_tensor_is_written_by_rows(tmp_path: Path) -> None:
    write_weights(tmp_path / "w", entries({"t": TENSORS["a"].T}))
    assert load_file(tmp_path / "w")["t"].tolist() == [[0, 3], [1, 4], [2, 5]]


def test_a_tensor_of_another_shape_is_our_own_fault(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="a"):
        write_weights(tmp_path / "w", [WeightEntry("a", (3, 2), lambda: TENSORS["a"])])


def test_mapped_weights(tmp_path: Path) -> None:
    write_weights(tmp_path / "w", entries(TENSORS))
    mapped = map_tensors(tmp_path / "w")
    assert mapped.keys() == TENSORS.keys()
    assert all(torch.equal(mapped[name], tensor.float()) for name, tensor in TENSORS.items())
