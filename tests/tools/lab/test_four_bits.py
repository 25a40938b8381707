"""A teacher in four bits whose numbers are llama.cpp's."""

from pathlib import Path

import pytest
import torch

from draftwood.compiler.teachers.checkpoint import Checkpoint
from draftwood.tools.demo import sizes
from draftwood.tools.lab.four_bits import in_four_bits, q4_0

# O outputs, H inputs


def weight() -> torch.Tensor:
    found_OH = torch.randn(16, 96, generator=torch.Generator().manual_seed(0))
    found_OH[3, :32] = 0
    return found_OH


def test_whole_numbers_are_the_nearest_and_the_largest_is_eight_steps_below_the_middle() -> None:
    given_OH = weight()
    whole_OH, scale_OG = q4_0(given_OH)
    scale_OH = scale_OG.float().repeat_interleave(32, 1)
    largest = given_OH.unflatten(1, (3, 32)).abs().argmax(2)
    assert set(whole_OH.unflatten(1, (3, 32)).gather(2, largest[..., None])[scale_OG != 0].tolist()[0]) == {0}
    apart = ((whole_OH.float() - 8) * scale_OH - given_OH).abs()
    # Half a step, a whole one where sixteen were needed, and the rounding of the scale.
    assert bool((apart <= scale_OH.abs() * torch.where(whole_OH == 15, 1.0, 0.5) * 1.01).all())
    assert whole_OH[3, :32].tolist() == [8] * 32 and scale_OG[3, 0] == 0


def test_they_are_those_of_gguf() -> None:
    gguf = pytest.importorskip("gguf")
    kind = gguf.GGMLQuantizationType.Q4_0
    whole_OH, scale_OG = q4_0(weight())
    want = gguf.quants.dequantize(gguf.quants.quantize(weight().numpy(), kind), kind)
    got_OH = (whole_OH.float() - 8) * scale_OG.float().repeat_interleave(32, 1)
    assert torch.equal(got_OH, torch.from_numpy(want))


def test_the_folder_is_read_as_the_same_numbers(tiny_teacher: Path, tmp_path: Path) -> None:
    out = in_four_bits(tiny_teacher, tmp_path)
    assert in_four_bits(tiny_teacher, tmp_path) == out
    plain, packed = Checkpoint.open(tiny_teacher), Checkpoint.open(out)
    assert len(packed.packed) == 14 and (out / "tokenizer.json").is_file()
    for name in plain.entries:
        if name not in packed.packed:
            assert torch.equal(packed.tensor(name), plain.tensor(name))
            continue
        whole_OH, scale_OG = q4_0(plain.tensor(name))
        assert torch.equal(packed.tensor(name), (whole_OH.float() - 8) * scale_OG.float().repeat_interleave(32, 1))


def test_a_dense_size_has_no_zeros(tiny_teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = {"hidden": 288, "intermediate": 704, "layers": 8, "heads": 6, "kv_heads": 3}
    monkeypatch.setitem(sizes.SIZES, "dense", shape)
    monkeypatch.setattr(sizes, "DENSE", ("dense",))
    teacher, _ = sizes.models("dense", tmp_path, "demo-medusa")
    found = Checkpoint.open(teacher)
    assert found.config.hidden == 288 and sorted(path.suffix for path in tmp_path.iterdir() if path.is_dir()) == [
        "",
        "",
    ]
    assert all(bool((found.tensor(name) != 0).all()) for name in found.entries if len(found.shape(name)) == 2)
