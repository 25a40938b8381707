"""The engine for an Ascend NPU: a bundle's NPU graphs, with weights and caches on the device.

What compiles and runs a graph there is an executor that other packages offer under the entry point group
``draftwood.executors``: the compiler's, which goes through torchair and needs torch_npu. It is looked up when the
engine is opened, so the runtime itself needs neither.
"""

from __future__ import annotations

from importlib.metadata import entry_points

from draftwood.environment import npu_count
from draftwood.errors import RequestError
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.engines.executor import Executor
from draftwood.runtime.engines.static import StaticEngine

EXECUTORS = "draftwood.executors"


class NpuEngine(StaticEngine):
    """Static graphs on the first NPU; it has never run on a device. ``executor`` stands in for it in tests.

    Raises:
        RequestError: there is no NPU here.
        BundleError: the bundle holds no graphs for one.
    """

    def __init__(self, bundle: Bundle, threads: int | None = None, executor: Executor | None = None) -> None:
        if executor is None and not npu_count():
            raise RequestError("--engine npu: no NPU is found here; run draftwood doctor, or take --engine ge")
        npu = bundle.npu_graphs()
        if npu.ranks > 1:
            raise RequestError(
                f"--engine npu: runs one device; {bundle.folder} is of {npu.ranks} ranks; take --engine ge or ranks, or"
                " build it for one"
            )
        super().__init__(bundle, npu.graphs, executor or _executor(bundle))


def _executor(bundle: Bundle) -> Executor:
    (offered,) = entry_points(group=EXECUTORS, name="torchair")
    found: Executor = offered.load()(bundle.folder, bundle.manifest)
    return found
