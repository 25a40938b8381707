"""Products of packed weights: the reference by hand, onnxruntime against the reference, and rows on their own."""

import numpy as np
import onnxruntime as ort
import pytest
import torch
from torch import Tensor, nn

from draftwood.kernels import nbits
from draftwood.kernels.nbits import BLOCK, packed_blocks, rounded_blocks
from draftwood.tests.exported import onnx_graph, opened

# T rows, H inputs, O outputs, B blocks
H, O = 352, 40  # noqa: E741  (eleven blocks: zeros of four bits end in half a byte)
# Share of the largest value by which sums of blocks in another order differ.
TOLERANCE = 1e-5


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Layer(nn.Module):
    """A random layer, and its matrix number by number."""

    def __init__(self, bits: int, zeros: bool, bias: bool = True) -> None:
        super().__init__()
        random, blocks = torch.Generator().manual_seed(bits), H // BLOCK
        whole = torch.randint(0, 1 << bits, (O, blocks, BLOCK), generator=random).to(torch.uint8)
        zero = torch.randint(0, 1 << bits, (O, blocks), generator=random).to(torch.uint8)
        zero = zero if zeros else torch.full_like(zero, 1 << (bits - 1))
        scale, self.bias = noise(O, blocks, seed=1).abs() * 0.01, noise(O, seed=2) if bias else None
        self.matrix = ((whole.double() - zero.double()[..., None]) * scale.double()[..., None]).flatten(1)
        self.packed = packed_blocks(whole, bits), scale, packed_blocks(zero, bits) if zeros else None

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.draftwood.nbits_linear(x, *self.packed, self.bias)


FORMS = pytest.mark.parametrize(("bits", "zeros"), [(4, False), (4, True), (8, False), (8, True)])


def exported(layer: Layer, cpu: bool = True) -> ort.InferenceSession:
    program = torch.export.export(layer, (noise(3, H),), dynamic_shapes=({0: torch.export.Dim("T")},))
    return opened(onnx_graph(program, cpu=cpu))


def test_a_block_has_a_scale_of_its_own() -> None:
    x = torch.zeros(1, 2 * BLOCK)
    x[0, :3], x[0, BLOCK : BLOCK + 2] = torch.tensor([127.0, 0.5, -1.6]), torch.tensor([1.27, 0.004])
    got = rounded_blocks(x)
    assert got[0, :3].tolist() == [127.0, 0.0, -2.0]  # halves to even
    assert float(got[0, BLOCK]) == pytest.approx(1.27) and float(got[0, BLOCK + 1]) == 0 and not got[0, 3:BLOCK].any()


@FORMS
def test_the_reference_is_the_product_of_rounded_rows(bits: int, zeros: bool) -> None:
    layer, x = Layer(bits, zeros), noise(5, H, seed=4)
    want = rounded_blocks(x).double() @ layer.matrix.t() + layer.bias
    assert (layer(x) - want).abs().max() <= TOLERANCE * want.abs().max()
    # A change by rounding is seen, and small.
    exact = x.double() @ layer.matrix.t() + layer.bias
    assert 1e-4 < float((want - exact).norm() / exact.norm()) < 0.02


@FORMS
def test_the_reference_unpacks_no_more_than_a_piece_at_a_time(
    bits: int, zeros: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, x, sizes = Layer(bits, zeros), noise(5, H, seed=4), list[int]()
    unpacked, want = nbits._unpacked, layer(x)

    def counted(packed: Tensor, *given: int) -> Tensor:
        sizes.append(len(packed) if packed.ndim == 3 else 0)
        return unpacked(packed, *given)

    monkeypatch.setattr(nbits, "_unpacked", counted)
    monkeypatch.setattr(nbits, "TOGETHER", 7 * H)
    assert (layer(x) - want).abs().max() <= TOLERANCE * want.abs().max()
    assert max(sizes) == 7 and sum(sizes) == O


@FORMS
@pytest.mark.parametrize("cpu", [True, False], ids=["cpu", "static"])
def test_onnxruntime_computes_the_reference(bits: int, zeros: bool, cpu: bool) -> None:
    layer = Layer(bits, zeros)
    session = exported(layer, cpu)
    for rows in (1, 2, 5, 16):
        x = noise(rows, H, seed=rows)
        got, want = session.run(None, {session.get_inputs()[0].name: x.numpy()})[0], layer(x).numpy()
        # A number half-way between two steps may be rounded the other way: a hundredth of a row at most.
        assert np.abs(got - want).max() <= 0.01 * np.abs(want).max()
        assert np.median(np.abs(got - want)) <= TOLERANCE * np.abs(want).max()


@FORMS
def test_a_row_has_the_same_bits_whatever_stands_beside_it(bits: int, zeros: bool) -> None:
    """On processors without AVX-512 four bits are summed in another order for a row alone; the engine runs none."""
    session = exported(Layer(bits, zeros, bias=False))
    name, x = session.get_inputs()[0].name, noise(33, H, seed=7).numpy()
    pairs = np.concatenate([session.run(None, {name: np.stack([row, row])})[0][:1] for row in x])
    for rows in (2, 3, 4, 5, 7, 8, 13, 16, 33):
        for start in (0, 1):
            got = session.run(None, {name: x[start : start + rows]})[0]
            assert np.array_equal(got.view(np.int32), pairs[start : start + rows].view(np.int32)), (rows, start)


class WithMinimum(Layer):
    """With a number that is added to all weights of a block."""

    def __init__(self, bits: int) -> None:
        super().__init__(bits, zeros=True)
        self.minimum_BO = noise(H // BLOCK, O, seed=3) * 0.1

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.draftwood.nbits_linear(x, *self.packed, self.bias, self.minimum_BO)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("cpu", [True, False])
def test_a_minimum_is_multiplied_by_the_sums_of_a_rows_blocks(bits: int, cpu: bool) -> None:
    layer, x_TH = WithMinimum(bits), noise(7, H, seed=4)
    sums_TB = x_TH.double().unflatten(1, (-1, BLOCK)).sum(-1)
    want_TO = rounded_blocks(x_TH).double() @ layer.matrix.t() + sums_TB @ layer.minimum_BO.double() + layer.bias
    assert torch.allclose(layer(x_TH).double(), want_TO, atol=TOLERANCE * float(want_TO.abs().max()))
    session = exported(layer, cpu)
    name = session.get_inputs()[0].name
    got_TO = session.run(None, {name: x_TH.numpy()})[0]
    # At level 4 onnxruntime may round a number that lies half between two steps to the other one.
    assert np.allclose(got_TO, want_TO.numpy(), atol=5e-3 * float(want_TO.abs().max()))
    for rows in (2, 3, 5):  # a row has the same bits in every launch of two or more
        assert np.array_equal(session.run(None, {name: x_TH[:rows].numpy()})[0], got_TO[:rows])
