"""Abilities of AscendCL, the runtime of ``.om`` files, on this machine, found out by trying it piece by piece."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np

from draftwood.errors import UserError
from draftwood.runtime.engines.acl.library import Library, ascendcl
from draftwood.runtime.engines.acl.memory import HOST_TO_DEVICE, AclDevice, DeviceArray

COUNT = 1 << 20


@dataclass(frozen=True, slots=True)
class Verdict:
    """One ability: whether it works, and what was seen."""

    ability: str
    works: bool
    seen: str


def probe(opened: Callable[[], Library] = ascendcl) -> list[Verdict]:
    """All verdicts, as far as one rests on the next; ``opened`` gives another library in tests."""
    verdicts: list[Verdict] = []
    try:
        library = opened()
        verdicts.append(Verdict("AscendCL with every function that the engine calls", True, "a device was opened"))
        verdicts.append(Verdict("the chip's name", True, (library.value("aclrtGetSocName") or b"").decode()))
        device = AclDevice(library)
        try:
            verdicts += [_zeros(device), _round_trip(device)]
        finally:
            device.close()
    except UserError as error:
        verdicts.append(Verdict("AscendCL", False, str(error)))
    return verdicts


def _zeros(device: AclDevice) -> Verdict:
    """Caches are not cleared by the allocation, and a masked value that is no number would still spread."""
    wrong = int(np.count_nonzero(np.asarray(DeviceArray.zeros(device, "float32", (1, COUNT)))))
    return Verdict("4 MB of zeros on the device", not wrong, f"{wrong} of {COUNT} numbers are not zero")


def _round_trip(device: AclDevice) -> Verdict:
    values = np.arange(COUNT, dtype=np.float32).reshape(1, COUNT)
    there, again = (DeviceArray.zeros(device, "float32", values.shape) for _ in range(2))
    device.copy(there.address, values.ctypes.data, values.nbytes, HOST_TO_DEVICE)
    again[:, :] = there
    wrong = int(np.count_nonzero(np.asarray(again) != values))
    return Verdict("4 MB to the device, from place to place on it, and back", not wrong, f"{wrong} numbers differ")


if __name__ == "__main__":
    print(json.dumps([asdict(verdict) for verdict in probe()]))
