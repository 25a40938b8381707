"""Draftwood: draft trees planned offline, frozen into static graphs, chosen per step by a thin runtime.

    import draftwood

    with draftwood.open("bundle") as model:
        print(model.generate("Once upon a time", max_new_tokens=64).text)

The folders of the repository are the packages of this namespace. Imports run one way: ``trees`` < ``kernels`` <
``compiler``. ``runtime`` needs neither ``compiler`` nor torch; ``tools`` uses all.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from draftwood.environment import shield_torch
from draftwood.telemetry import hush_onnxruntime
from draftwood.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from draftwood.compiler.bundle.request import BuildRequest
    from draftwood.manifest import Manifest
    from draftwood.runtime.engines.opening import Opening
    from draftwood.runtime.opened import OpenedBundle
    from draftwood.trees.calibration import Calibration
    from draftwood.trees.latency import LatencyTable
    from draftwood.trees.occupancy import Occupancy
    from draftwood.trees.plan_file import Limits, Plan

__all__ = ["BuildRequest", "Opening", "__version__", "build", "open", "plan"]

if sys.platform == "win32":
    raise ImportError("draftwood runs on Linux and macOS, and not on Windows, which has no fcntl and no resource")

# Here, since everything of Draftwood that imports torch or onnxruntime imports this package first.
shield_torch()
hush_onnxruntime()

# Each function imports its needs when it is called: a program that runs a bundle needs neither compiler nor torch.


def build(request: BuildRequest, out: str | Path, progress: Callable[[str], None] | None = None) -> Manifest:
    """Freezes a checkpoint and its draft trees into the bundle ``out``, whole or not at all.

    Args:
        request: what to build (`BuildRequest`). A drafter that no tree of it is drafted by is left out.
        progress: called with the name of each stage.

    Raises:
        UserError: the inputs do not fit; nothing is left over.
    """
    from draftwood.compiler.bundle.build import build as write
    from draftwood.errors import BundleError, InvariantError
    from draftwood.runtime.bundle import Bundle

    def prove(folder: Path) -> None:
        try:
            Bundle.open(folder, "fast")
        except BundleError as error:
            raise InvariantError(f"what was built cannot be opened: {error}") from error

    return write(request, _path("out", out), progress or (lambda _: None), prove)


def plan(
    calibration: Calibration,
    limits: Limits | None = None,
    latency: LatencyTable | None = None,
    sampled: Calibration | None = None,
    occupancy: Occupancy | None = None,
) -> Plan:
    """Chooses draft trees, and with a latency table gears, by an exact search over counted rank paths.

    Args:
        calibration: what the teacher's text took through the drafter's candidates.
        limits: sizes that may not be passed.
        latency: what every step costs; without one, trees by size.
        sampled: the same of sampled text, if ``calibration`` has greedy text alone; the plan serves both.
        occupancy: how often how many texts are there; every number that ``latency`` has steps for equally often.

    Raises:
        TreeError: the statistics hold nothing to plan from.
    """
    from draftwood.trees.calibration import Calibration as Counts
    from draftwood.trees.latency import LatencyTable as Table
    from draftwood.trees.occupancy import Occupancy as Shares
    from draftwood.trees.plan import make_plan
    from draftwood.trees.plan_file import Limits as Sizes

    limits = Sizes(nodes=63) if limits is None else limits
    _check("calibration", calibration, Counts)
    _check("limits", limits, Sizes)
    _check("latency", latency, Table | None)
    _check("sampled", sampled, Counts | None)
    _check("occupancy", occupancy, Shares | None)
    return make_plan(calibration, limits, latency, sampled, occupancy)


def open(folder: str | Path, opening: Opening | None = None, **options: Any) -> OpenedBundle:
    """Opens a bundle and proves that it holds together.

    Args:
        folder: a folder made by ``build``.
        opening: how (`Opening`, where each option is described): ``engine``, ``verify``, ``threads``, ``cache_bytes``,
            ``prefixes``, ``waiting``, ``fallback``.
        options: the same by name, as in ``draftwood.open(folder, engine="cpu", threads=4)``; they go before those of
            ``opening``.

    Returns:
        An opened bundle with ``generate`` and ``stream``, a context manager, safe to use from several threads. If
        another engine than the one asked for decodes, ``engine_name`` and ``refused`` say so.

    Raises:
        BundleError: not a bundle, damaged, or of another version.
        RequestError: no such option, engine or device.
    """
    from draftwood.runtime.engines.opening import USUAL, Opening
    from draftwood.runtime.opened import open_bundle

    _check("opening", opening, Opening | None)
    return open_bundle(_path("folder", folder), (opening or USUAL).but(**options))


def _path(name: str, given: str | Path) -> Path:
    """A path from a program; RequestError if it is none."""
    from pathlib import Path

    from draftwood.errors import RequestError

    try:
        return Path(given)
    except TypeError:
        raise RequestError(f"{name}: expected a path, got {type(given).__name__}") from None


def _check(name: str, value: object, kind: Any) -> None:
    """Raises RequestError if an argument is of another kind: that would show only where it is used."""
    from draftwood.errors import RequestError

    if not isinstance(value, kind):
        expected = kind.__name__ if isinstance(kind, type) else kind
        raise RequestError(f"{name}: expected {expected}, got {type(value).__name__}")


if not TYPE_CHECKING:  # to a type checker every name would then be one of this package

    def __getattr__(name: str) -> Any:
        """``BuildRequest`` and ``Opening``, imported only if they are asked for."""
        if name == "BuildRequest":
            from draftwood.compiler.bundle.request import BuildRequest

            return BuildRequest
        if name == "Opening":
            from draftwood.runtime.engines.opening import Opening

            return Opening
        raise AttributeError(f"module 'draftwood' has no attribute {name!r}")
