"""The engine that runs the ``.om`` files which ATC has made of a bundle's NPU graphs; CANN alone is needed for it."""

from __future__ import annotations

import hashlib
import platform
import re
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from draftwood.environment import cann_available
from draftwood.errors import BundleError, RequestError
from draftwood.files import read_regular
from draftwood.manifest import MANIFEST_FILE, GraphSet, GraphSignature
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.engines.acl.library import Library, ascendcl
from draftwood.runtime.engines.acl.memory import AclDevice, DeviceArray, MemoryBlock
from draftwood.runtime.engines.acl.model import Model, Weights, work_bytes
from draftwood.runtime.engines.opening import USUAL, Opening
from draftwood.runtime.engines.static import StaticEngine
from draftwood.runtime.speculation.kv_cache import Buffer

OM_FOLDER = "npu/om"
WEIGHT_FOLDER = "weight"  # where ATC puts what ``--external_weight`` keeps out of the models
# What the script that calls ATC writes last: the SHA-256 of the manifest that the models were made under, and the chip.
MADE_OF = "manifest.sha256"
# A path of which CANN reads a model (CheckInputPathValid in base/common/util.cc of GE).
_READ = re.compile("[\u4e00-\u9fa5A-Za-z0-9./_-]+")


class AclExecutor:
    """All models of a bundle on one device: the weights once, and one work memory, since they take turns."""

    def __init__(self, bundle: Bundle, graphs: GraphSet, library: Library) -> None:
        folder = compiled(bundle.folder)
        paths = {graph.name: _om(folder, Path(graph.file).stem) for graph in graphs.graphs}
        missing = [path for path in paths.values() if not path.is_file()]
        if missing:
            raise BundleError(f"{missing[0]}: missing; run {bundle.folder}/npu/atc.sh again")
        # CANN compares families of chips alone; a kernel is cut for the number of cores of one.
        here, chip = (library.value("aclrtGetSocName") or b"").decode(), _made_of(folder)[2:]
        if here and chip and chip != [here]:
            raise BundleError(
                f"{folder}: compiled for {chip[0]}, and the device is {here}; run"
                f" SOC_VERSION={here} sh {bundle.folder}/npu/atc.sh"
            )
        self._kind = graphs.precision.caches
        self.device = AclDevice(library)
        try:
            self._weights = Weights(self.device, folder / WEIGHT_FOLDER)
            self._work = MemoryBlock(self.device, max(work_bytes(self.device, path) for path in paths.values()), "work")
            self._models = {
                graph.name: Model(self.device, paths[graph.name], graph, self._weights, self._work)
                for graph in graphs.graphs
            }
        except BaseException:
            self.device.close()
            raise

    def zeros(self, shape: tuple[int, ...]) -> DeviceArray:
        """A buffer of zeros on the device, in the caches' element type."""
        return DeviceArray.zeros(self.device, self._kind, shape)

    def run(self, graph: GraphSignature, inputs: dict[str, NDArray], buffers: dict[str, Buffer]) -> dict[str, NDArray]:
        """See `executor.Executor.run`."""
        return self._models[graph.name].run(inputs, buffers)

    def read(self, buffer: DeviceArray) -> NDArray[np.float32]:
        """See `executor.Executor.read`."""
        return np.asarray(buffer)

    def close(self) -> None:
        """Unloads the models and gives all memory back, that of texts included."""
        self.device.close()


class AclEngine(StaticEngine):
    """Static graphs as ``.om`` files, on the first NPU; it has never run on a device.

    Raises:
        RequestError: there is no CANN, it is too old, or the device is full.
        BundleError: the bundle holds no NPU graphs, or they were not compiled by ATC.
    """

    executor: AclExecutor

    def __init__(self, bundle: Bundle, opening: Opening = USUAL, library: Library | None = None) -> None:
        npu = bundle.npu_graphs()
        if npu.ranks > 1:
            raise RequestError(
                f"--engine acl: {bundle.folder} is for {npu.ranks} devices, which ATC cannot compile for; take"
                " --engine ge or ranks, or build it for one"
            )
        compiled(bundle.folder)  # before the library: a bundle that was not compiled is refused on any machine
        super().__init__(bundle, npu.graphs, AclExecutor(bundle, npu, library or ascendcl()))

    def close(self) -> None:
        super().close()
        self.executor.close()


def compiled(folder: Path) -> Path:
    """The folder of a bundle's ``.om`` files; BundleError unless all were compiled from the bundle as it is now."""
    models, again = folder / OM_FOLDER, f"run {folder}/npu/atc.sh on a machine with CANN"
    if not _READ.fullmatch(str(models.resolve())):
        raise BundleError(
            f"{models}: CANN reads no path with other characters than letters, digits, - . and _; move the bundle"
        )
    try:
        made_of = _made_of(models)[0]
    except (OSError, ValueError, IndexError):
        raise BundleError(f"{models}: holds no .om files, or not all; {again}") from None
    if made_of != hashlib.sha256(read_regular(folder / MANIFEST_FILE)).hexdigest():
        raise BundleError(f"{models}: made of another build of the bundle, or of other weights; {again} again")
    return models


def _om(models: Path, name: str) -> Path:
    """A graph's file; ATC adds the host's system to a name if the model holds code for the host (its --output)."""
    named = models / f"{name}_{platform.system().lower()}_{platform.machine()}.om"
    return named if named.is_file() else models / f"{name}.om"


def _made_of(models: Path) -> list[str]:
    """The words of the script's last file: digest, manifest, and the chip, which older scripts leave out."""
    return read_regular(models / MADE_OF, 1 << 10).decode().split()


def is_ready(bundle: Bundle) -> bool:
    """Whether CANN is here, and ATC has made ``.om`` files in the bundle, outdated or not."""
    return cann_available() and (bundle.folder / OM_FOLDER / MADE_OF).is_file()
