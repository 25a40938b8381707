"""Draftwood: draft trees planned offline, frozen into static graphs, chosen per step by a thin runtime.

    import draftwood

    with draftwood.open("bundle") as model:
        print(model.generate("Once upon a time", max_new_tokens=64).text)

The folders of the repository are the packages of this namespace. Imports run one way: ``trees`` < ``kernels`` <
``compiler``. ``runtime`` needs neither ``compiler`` nor torch; ``tools`` uses all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from draftwood.environment import shield_torch
from draftwood.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from draftwood.compiler.bundle.request import BuildRequest
    from draftwood.manifest import Manifest
    from draftwood.runtime.bundle import Verify
    from draftwood.runtime.opened import OpenedBundle
    from draftwood.trees.calibration import Calibration
    from draftwood.trees.latency import LatencyTable
    from draftwood.trees.occupancy import Occupancy
    from draftwood.trees.plan_file import Limits, Plan

__all__ = ["BuildRequest", "__version__", "build", "open", "plan"]

# Here, since everything of Draftwood that imports torch imports this package first.
shield_torch()

# What each function needs is imported when it is called: whoever runs a bundle needs neither compiler nor torch.


def build(request: BuildRequest, out: str | Path, progress: Callable[[str], None] | None = None) -> Manifest:
    """Freezes a checkpoint and its draft trees into the bundle ``out``, whole or not at all.

    Args:
        request: what to build (`BuildRequest`). A drafter that no tree of it is drafted by is left out.
        progress: called with the name of each stage.

    Raises:
        UserError: the inputs do not fit; nothing is left over.
    """
    from pathlib import Path

    from draftwood.compiler.bundle.build import build as write
    from draftwood.errors import BundleError, InvariantError
    from draftwood.runtime.bundle import Bundle

    def prove(folder: Path) -> None:
        try:
            Bundle.open(folder, "fast")
        except BundleError as error:
            raise InvariantError(f"what was built cannot be opened: {error}") from error

    return write(request, Path(out), progress or (lambda _: None), prove)


def plan(
    calibration: Calibration,
    limits: Limits | None = None,
    latency: LatencyTable | None = None,
    classes: int = 1,
    sampled: Calibration | None = None,
    occupancy: Occupancy | None = None,
) -> Plan:
    """Chooses draft trees, and with a latency table gears, by an exact search over counted rank paths.

    Args:
        calibration: what the teacher's text took through the drafter's candidates.
        limits: sizes that may not be passed.
        latency: what every step costs; without one, trees by size.
        classes: confidence classes with trees of their own.
        sampled: the same of sampled text, if ``calibration`` has greedy text alone; the plan serves both.
        occupancy: how often how many texts are there; every number that ``latency`` has steps for equally often.

    Raises:
        TreeError: the statistics hold nothing to plan from.
    """
    from draftwood.trees.plan import make_plan
    from draftwood.trees.plan_file import Limits as Sizes

    return make_plan(calibration, limits or Sizes(nodes=63), latency, classes, sampled, occupancy)


def open(
    folder: str | Path,
    *,
    engine: str | None = None,
    verify: Verify | None = None,
    threads: int | None = None,
    bitwise: bool = False,
    cache_bytes: int | None = None,
    prefixes: bool = True,
    waiting: int | None = None,
    fallback: bool = False,
) -> OpenedBundle:
    """Opens a bundle and proves that it holds together.

    Args:
        folder: a folder made by ``build``.
        engine: ``cpu``, ``npu`` or another registered engine; the best that machine and bundle allow where None.
        verify: ``full`` hashes every file, ``fast`` only what has changed since the last full verification on this
            machine; None is full once and fast after that.
        threads: processors to use; all where None.
        bitwise: decode on a CPU with rows that have the same bits in every tree; the bundle must be built for it.
        cache_bytes: of all texts' caches together; a text for which there is no room waits. By default there is room
            for twice as many texts of the whole context as a launch takes, in at most half of the machine's memory.
        prefixes: keep the caches of ended texts, as far as there is room, for prompts that begin like them.
        waiting: texts that may wait for room; one more is refused with BusyError. Any number where None.
        fallback: where the engine cannot be opened, or fails in its quick proof, decode with what there is: a CPU's
            engine, or eager PyTorch for graphs of an NPU alone. ``engine_name`` and ``refused`` then say so.

    Returns:
        An opened bundle with ``generate`` and ``stream``, a context manager, safe to use from several threads.

    Raises:
        BundleError: not a bundle, damaged, or of another version.
        RequestError: no such engine or device.
    """
    from draftwood.runtime.opened import open_bundle

    return open_bundle(
        folder,
        engine=engine,
        verify=verify,
        threads=threads,
        bitwise=bitwise,
        cache_bytes=cache_bytes,
        prefixes=prefixes,
        waiting=waiting,
        fallback=fallback,
    )


def __getattr__(name: str) -> Any:
    """``BuildRequest`` without importing the compiler for those who only run bundles."""
    if name == "BuildRequest":
        from draftwood.compiler.bundle.request import BuildRequest

        return BuildRequest
    raise AttributeError(f"module 'draftwood' has no attribute {name!r}")
