"""Integer products: the reference against whole numbers, the ONNX form against the reference, rows on their own."""

import platform
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
import torch
from torch import Tensor, nn

from draftwood.kernels import quantised
from draftwood.kernels.quantised import LEAST, products, quantise_rows
from draftwood.runtime.engines.sessions import products_saturate
from draftwood.tests.exported import onnx_graph, opened

# T rows, H inputs, O outputs
H, O = 1500, 40  # noqa: E741  (more inputs than one exact sum in fp32 takes)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def weights() -> tuple[Tensor, Tensor, Tensor]:
    whole = torch.randint(-128, 128, (H, O), dtype=torch.int8, generator=torch.Generator().manual_seed(1))
    return whole, noise(O, seed=2).abs() * 1e-3, noise(O, seed=3)


class Layer(nn.Module):
    def __init__(self, weights: tuple[Tensor, Tensor, Tensor], bias: bool) -> None:
        super().__init__()
        self.weights = weights if bias else weights[:2]

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.draftwood.quantised_linear(x, *self.weights)


def exported(layer: Layer, *more: str, exact: bool = False, cpu: bool = False) -> ort.InferenceSession:
    """The layer's ONNX form on onnxruntime; the results of operators ``more`` are outputs as well."""
    rows = {0: torch.export.Dim("T")}
    program = torch.export.export(layer, (noise(3, H),), dynamic_shapes=(rows,))
    model = onnx_graph(program, cpu=cpu)
    for node in list(model.graph):
        if node.op_type in more:
            model.graph.outputs.append(node.outputs[0])
    return opened(model, exact)


@pytest.mark.parametrize("outputs", [7, 512], ids=["in pieces", "whole"])
def test_products_are_those_of_whole_numbers(
    weights: tuple[Tensor, Tensor, Tensor], outputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantised, "_OUTPUTS", outputs)
    left = torch.randint(-127, 128, (5, H), dtype=torch.int8)
    left[0], largest = 127, torch.full((H, 1), -128, dtype=torch.int8)
    assert torch.equal(products(left, weights[0]).long(), left.long() @ weights[0].long())
    assert products(left[:1], largest).item() == -128 * 127 * H


def test_rows_are_rounded_half_to_even_each_by_its_own_scale() -> None:
    rows, scales = quantise_rows(torch.tensor([[127.0, 0.5, 1.5, -2.5], [1.0, -1.0, 0.25, 0.0]]))
    assert rows.tolist() == [[127, 0, 2, -2], [127, -127, 32, 0]]
    assert scales.flatten().tolist() == pytest.approx([1.0, 1 / 127], rel=1e-7)


def test_rows_of_zeros_and_nearly_zeros_are_zeros(weights: tuple[Tensor, Tensor, Tensor]) -> None:
    x = torch.zeros(2, H)
    x[1, 0] = LEAST / 1000
    assert not quantise_rows(x)[0].any() and not Layer(weights, bias=False)(x).any()
    assert torch.equal(Layer(weights, bias=True)(x), weights[2].expand(2, O))


def test_a_row_has_the_same_bits_beside_any_others(weights: tuple[Tensor, Tensor, Tensor]) -> None:
    layer, x = Layer(weights, bias=True), noise(16, H, seed=4)
    x[3] *= 100
    whole = layer(x)
    for count in (1, 2, 5):
        assert torch.equal(layer(x[:count]), whole[:count])


@pytest.mark.parametrize("bias", [False, True])
def test_the_onnx_form_is_the_reference_bit_for_bit(weights: tuple[Tensor, Tensor, Tensor], bias: bool) -> None:
    """The bias too: a scale applied after it would change it."""
    layer = Layer(weights, bias)
    session = exported(layer, "MatMulInteger", exact=bias or products_saturate())
    for rows in (1, 2, 16):
        x = noise(rows, H, seed=5)
        x[-1] = 0.0
        got, sums = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        assert np.array_equal(sums, products(quantise_rows(x)[0], weights[0]).numpy())
        assert np.array_equal(got, layer(x).numpy())


@pytest.mark.parametrize("bias", [False, True])
def test_a_cpus_form_has_the_same_bits(weights: tuple[Tensor, Tensor, Tensor], bias: bool) -> None:
    """Of numbers that lie half between two steps, too, and of rows of zeros."""
    layer = Layer(weights, bias)
    session = exported(layer, exact=bias or products_saturate(), cpu=True)
    for rows in (1, 2, 16):
        x = noise(rows, H, seed=7)
        x[0, :254], x[0, 254:] = torch.arange(-127, 127) + 0.5, 0.0
        x[0, 300], x[-1, 600:] = 127.0, 0.0
        got = session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]
        assert np.array_equal(got.view(np.int32), layer(x).numpy().view(np.int32))


def test_halves_are_computed_in_fp32_and_rounded_once(weights: tuple[Tensor, Tensor, Tensor]) -> None:
    x = noise(4, H, seed=6).bfloat16()
    got = Layer(weights, bias=False)(x)
    assert got.dtype == torch.bfloat16 and torch.equal(got, Layer(weights, bias=False)(x.float()).bfloat16())


def test_processors_whose_products_saturate_are_known(tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    for line, saturates in (
        ("flags\t\t: fpu avx2 avx512f", True), ("flags\t\t: avx2 avx_vnni", False), ("Features\t: asimddp i8mm", False)
    ):  # fmt: skip
        path.write_text(f"processor\t: 0\n{line}\n")
        assert products_saturate(path) is saturates
    assert products_saturate(tmp_path / "missing") is (platform.machine() in ("x86_64", "AMD64"))
