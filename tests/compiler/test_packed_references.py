"""The weights that auto-round makes of the same files, bit for bit.

It rounds the product to the scale's type at once; ours is exact, and rounded here.
"""

from importlib import import_module
from pathlib import Path

import pytest
import torch

from draftwood.tests.packed_checkpoints import both

F16, BF16 = torch.float16, torch.bfloat16


@pytest.mark.parametrize("group", [32, -1])
@pytest.mark.parametrize(("layout", "dtype"), [("awq", F16), ("auto_round:auto_awq", BF16)])
def test_awq(tiny_teacher: Path, tmp_path: Path, layout: str, dtype: torch.dtype, group: int) -> None:
    """``dequantize_gemm`` is autoawq's own, which auto-round carries along."""
    theirs = import_module("auto_round.export.export_to_awq.utils")
    for tensors, ours in both(tiny_teacher, tmp_path / "packed", layout, dtype=dtype, group=group):
        size = ours.shape[1] if group == -1 else group
        wanted = theirs.dequantize_gemm(tensors["qweight"], tensors["qzeros"], tensors["scales"], 4, size)
        assert wanted.dtype == dtype and torch.equal(ours, wanted.t())


@pytest.mark.parametrize("asked", [{}, {"symmetric": True}, {"group": -1}, {"bits": 8}, {"dtype": BF16}], ids=str)
@pytest.mark.parametrize(
    ("layout", "module"), [("gptq", "_zp"), ("auto_round:auto_gptq", "_zp"), ("gptq_v2", ""), ("auto_round", "")]
)
def test_gptq(tiny_teacher: Path, tmp_path: Path, layout: str, module: str, asked: dict) -> None:
    """auto-round has a class for zeros less one and another for zeros as they are."""
    theirs = import_module(f"auto_round_extension.torch.qlinear_torch{module}")
    for tensors, ours in both(tiny_teacher, tmp_path / "packed", layout, **asked):
        outputs, inputs = ours.shape
        linear = theirs.QuantLinear(asked.get("bits", 4), asked.get("group", 32), inputs, outputs, bias=False)
        linear.qweight, linear.qzeros, linear.scales = (tensors[name] for name in ("qweight", "qzeros", "scales"))
        assert torch.equal(ours.float(), linear(torch.eye(inputs)).t())
