"""bf16 on the host, as torch rounds it."""

import numpy as np
import pytest
import torch

from draftwood.runtime.engines.acl.values import KINDS, store, to_host

from .ascendcl import NUMBERS


def test_bf16_is_rounded_as_torch_rounds_it() -> None:
    bits = np.random.default_rng(0).integers(0, 1 << 32, 1 << 16, dtype=np.uint32)
    ties = (np.arange(1 << 12, dtype=np.uint32) << 20) | 0x8000
    values = np.concatenate((bits, ties)).view(np.float32)
    stored = np.zeros(len(values), np.uint16)
    store(stored, values)
    want = torch.from_numpy(values.copy()).to(torch.bfloat16)
    assert np.array_equal(to_host(stored, "bfloat16"), want.float().numpy(), equal_nan=True)


@pytest.mark.parametrize("kind", ["float16", "int64", "bool"])
def test_other_types_keep_their_values(kind: str) -> None:
    values = np.array([[0, 1], [1, 0]])
    stored = np.zeros((2, 2), kind)
    store(stored, values)
    assert np.array_equal(to_host(stored, kind), values)


def test_the_numbers_of_element_types_are_ges() -> None:
    assert {str(dtype).removeprefix("torch."): number for dtype, number in NUMBERS.items()} == {
        kind: number for number, kind in KINDS.items()
    }
