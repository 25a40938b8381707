"""The tiny bundle, opened, and a prompt for it."""

from pathlib import Path

import numpy as np
import pytest

from draftwood.runtime.bundle import Bundle


@pytest.fixture(scope="session")
def bundle(tiny_bundle: Path) -> Bundle:
    return Bundle.open(tiny_bundle)


@pytest.fixture
def prompt() -> list[int]:
    return np.random.default_rng(5).integers(2, 300, 40).tolist()
