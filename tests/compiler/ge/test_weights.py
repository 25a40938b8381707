"""The one file of weights: places, values read back, refusals."""

from pathlib import Path

import pytest
import torch

from draftwood.compiler.checkpoints.weight import WeightEntry
from draftwood.compiler.ge.weights import (
    ALIGNMENT,
    map_npu_weights,
    plan_weights,
    read_index,
    write_index,
    write_npu_weights,
)
from draftwood.compiler.targets.ge import _wide_biases
from draftwood.compiler.targets.modules import _of_layer
from draftwood.errors import BundleError

SHAPES = {"a.weight": (3, 5), "a_weight": (7,), "empty": (0,), "scalar": (), "c": (300, 2)}


def values() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(shape) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_what_is_written_is_read_back(tmp_path: Path, dtype: torch.dtype) -> None:
    index = plan_weights(SHAPES, dtype, "weights.bin", {"c": ("x", "y")}, {})
    given = values()
    write_npu_weights(tmp_path / "weights.bin", index, lambda name: given[name])
    write_index(tmp_path / "weights.json", index)
    assert (tmp_path / "weights.bin").stat().st_size == index.bytes
    assert read_index(tmp_path / "weights.json") == index
    found = map_npu_weights(tmp_path, index)
    assert found.keys() == SHAPES.keys()
    for name, tensor in found.items():
        assert tensor.dtype == dtype and torch.equal(tensor, given[name].to(dtype)), name


def test_names_that_differ_in_a_dot_lie_apart() -> None:
    constants = plan_weights(SHAPES, torch.bfloat16, "weights.bin", {}, {}).constants
    assert constants["a.weight"].offset != constants["a_weight"].offset
    assert all(constant.offset % ALIGNMENT == 0 for constant in constants.values())


def test_linked_weights_stay_where_they_are(tmp_path: Path) -> None:
    other = tmp_path / "elsewhere.bin"
    kept = torch.arange(15, dtype=torch.bfloat16)
    other.write_bytes(b"head" + kept.view(torch.uint8).numpy().tobytes())
    index = plan_weights(SHAPES, torch.bfloat16, "weights.bin", {}, {"a.weight": (other, 4)})
    given = values()
    write_npu_weights(tmp_path / "weights.bin", index, lambda name: given[name] if name != "a.weight" else None)
    assert torch.equal(map_npu_weights(tmp_path, index)["a.weight"], kept.view(3, 5))
    unlinked = plan_weights(SHAPES, torch.bfloat16, "weights.bin", {}, {})
    assert index.bytes == unlinked.bytes - ALIGNMENT


def test_biases_of_bf16_products_lie_in_float32() -> None:
    """Biases of int8 layers and of fp16 products keep their type; a module has all in its layer's type."""
    half, whole = torch.bfloat16, torch.int8

    def entry(name: str, dtype: torch.dtype) -> WeightEntry:
        return WeightEntry(name, (2,), lambda: torch.ones(2, dtype=dtype), dtype=dtype)

    plain = [entry("a.weight", half), entry("a.bias", half), entry("b.weight", whole), entry("b.bias", half)]
    assert _wide_biases(plain) == {"a.bias": torch.float32}
    assert _wide_biases([entry("a.weight", torch.float16), entry("a.bias", torch.float16)]) == {}
    wide = {"a.weight": torch.ones(2, dtype=half), "a.bias": torch.ones(2)}
    assert _of_layer(wide, "a.bias", (2,)).dtype == half
    assert _of_layer({"free.bias": torch.ones(2)}, "free.bias", (2,)).dtype.itemsize == 4
    for name, shape in (("a.bias", (3,)), ("b.bias", (2,))):
        with pytest.raises(BundleError, match=f"{name}: the network that the manifest describes has"):
            _of_layer(wide, name, shape)


def test_missing_short_and_damaged_files(tmp_path: Path) -> None:
    index = plan_weights(SHAPES, torch.bfloat16, "weights.bin", {}, {})
    with pytest.raises(BundleError, match=r"no weights; the bundle was built without them; run draftwood bind"):
        map_npu_weights(tmp_path, index)
    (tmp_path / "weights.bin").write_bytes(b"\0" * 16)
    with pytest.raises(BundleError, match=r"ends before a\.weight; bind the weights again"):
        map_npu_weights(tmp_path, index)
    (tmp_path / "weights.json").write_text("{}")
    with pytest.raises(BundleError, match="not a weight index"):
        read_index(tmp_path / "weights.json")
