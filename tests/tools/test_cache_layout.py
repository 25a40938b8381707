"""Forms of one layer that are timed against each other compute the same, and write the same rows."""

import json

import numpy as np
import pytest

from draftwood.tools.measure.cache_layout import FORMS, Bound, Sizes, main

SIZES = Sizes(slots=64, rows=5, heads=4, kv_heads=2, dim=16)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_attends_and_writes_alike(form: str) -> None:
    first, other = Bound("heads", SIZES, 1), Bound(form, SIZES, 1)
    first.run(), other.run()
    np.testing.assert_allclose(other.out, first.out, atol=1e-5)  # of order 1, sums of 37 products in fp32
    keys = other.given["keys"].reshape((-1, 2, 16) if form.startswith("tokens") else (2, -1, 16))
    by_head = keys.swapaxes(0, 1) if form.startswith("tokens") else keys
    assert np.array_equal(by_head.reshape(-1, 16), first.given["keys"]) and first.given["keys"].any()


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--slots", "128", "--rows", "3", "--rounds", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["forms"]
    assert set(found) == set(FORMS) and found["heads"]["of_heads"] == 1.0
