"""Shared by all tests, and loaded before any of them imports torch or transformers."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parents[1]
# `python -m pytest` puts the checkout on the path, where transformers would take our kernels/ for its own
# `kernels`. What is tested is the installed draftwood, so nothing is lost.
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]

from draftwood.environment import hide_torch_npu  # noqa: E402

hide_torch_npu()

settings.register_profile("draftwood", derandomize=True, deadline=None)
settings.load_profile("draftwood")

BLOCKER = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if any(name == blocked or name.startswith(blocked + ".") for blocked in {blocked!r}):
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocker())
"""


@pytest.fixture
def python(tmp_path: Path) -> Callable[..., str]:
    """Runs code in a fresh interpreter outside the checkout and returns what it printed.

    Modules in ``blocked``, and all below them, look as if they were not installed. ``environment`` is added
    to the inherited variables; None removes one.
    """

    def run(
        code: str, blocked: Iterable[str] = (), environment: Mapping[str, str | None] | None = None
    ) -> str:
        variables = {**os.environ, **(environment or {})}
        done = subprocess.run(
            [sys.executable, "-c", BLOCKER.format(blocked=tuple(blocked)) + code],
            cwd=tmp_path,
            env={name: value for name, value in variables.items() if value is not None},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run
