"""The engine for an Ascend NPU: a bundle's NPU graphs, with weights and caches on the device.

A graph's executor there comes from other packages, under the entry point group ``draftwood.executors``: the compiler's
two, which need torch_npu. One compiles through torchair and GE, the other captures launches. They are looked up when
the engine is opened, so the runtime itself needs neither.
"""

from __future__ import annotations

from importlib.metadata import entry_points

from draftwood.environment import npu_chips, npu_count
from draftwood.errors import RequestError
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.engines.executor import Executor
from draftwood.runtime.engines.opening import USUAL, Opening
from draftwood.runtime.engines.static import StaticEngine
from draftwood.versions import unsupported

EXECUTORS = "draftwood.executors"


class NpuEngine(StaticEngine):
    """Static graphs on the first NPU; it has never run on a device. ``executor`` stands in for it in tests.

    Raises:
        RequestError: there is no NPU here.
        BundleError: the bundle holds no graphs for one.
    """

    # The engine's name, and that of its executor.
    name, offered = "npu", "torchair"

    def __init__(self, bundle: Bundle, opening: Opening = USUAL, executor: Executor | None = None) -> None:
        chips = npu_chips() if executor is None else ()
        if executor is None and not chips:
            raise RequestError(f"--engine {self.name}: no NPU is found here; run draftwood doctor, or take --engine ge")
        if why := next(filter(None, map(unsupported, chips)), ""):
            raise RequestError(f"--engine {self.name}: {why}; take --engine ge")
        npu = bundle.npu_graphs()
        if npu.ranks > 1:
            raise RequestError(
                f"--engine {self.name}: runs one device; {bundle.folder} is of {npu.ranks} ranks; take --engine ranks,"
                " which torchrun starts, or build it for one"
            )
        super().__init__(bundle, npu.graphs, executor or _executor(bundle, self.offered))


class CapturedEngine(NpuEngine):
    """An NPU without GE: a step's operators are launched once as they are, recorded, and replayed as one launch."""

    name, offered = "npu-captured", "captured"


def is_ready(bundle: Bundle) -> bool:
    """Whether there is an NPU here."""
    return npu_count() > 0


def _executor(bundle: Bundle, name: str) -> Executor:
    (offered,) = entry_points(group=EXECUTORS, name=name)
    executor: Executor = offered.load()(bundle.folder, bundle.manifest)
    return executor
