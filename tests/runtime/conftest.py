"""The tiny bundle, as files and ready to generate, and a prompt for it."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import draftwood
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.opened import OpenedBundle


@pytest.fixture(scope="session")
def bundle(tiny_bundle: Path) -> Bundle:
    return Bundle.open(tiny_bundle)


@pytest.fixture(scope="module")
def medusa(tiny_bundle: Path) -> Iterator[OpenedBundle]:
    with draftwood.open(tiny_bundle, threads=1) as opened:
        yield opened


@pytest.fixture
def prompt() -> list[int]:
    return np.random.default_rng(5).integers(2, 300, 40).tolist()
