"""The tiny bundles through Qualcomm's compiler, run by its emulator, each next to eager PyTorch.

The tests are several files, for a file is what one process of the suite runs.
"""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from draftwood.runtime.bundle import Bundle
from draftwood.runtime.engines.qnn import HtpEngine
from draftwood.runtime.rounding import HALF_TOLERANCE
from draftwood.tools.comparison.compare import Pair
from draftwood.tools.reference.eager import EagerEngine


@pytest.fixture(scope="session", autouse=True)
def package() -> None:
    pytest.importorskip("onnxruntime_qnn", reason="needs the package onnxruntime-qnn")


@pytest.fixture(scope="session")
def pairs(package: None, tiny_bundles: dict[str, Path]) -> dict[str, Pair]:
    """By kind of drafter; a graph is compiled when it is first run."""
    bundles = {kind: Bundle.open(folder) for kind, folder in tiny_bundles.items()}
    return {kind: Pair("qnn", EagerEngine(one), HtpEngine(one), HALF_TOLERANCE) for kind, one in bundles.items()}


@pytest.fixture
def short_prompt() -> NDArray[np.int64]:
    return np.random.default_rng(3).integers(2, 300, 20)
