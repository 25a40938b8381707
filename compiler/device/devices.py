"""The devices that can be modelled, with their public figures, and the time that one spends on operators."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from draftwood.compiler.device.constants import (
    COLLECTIVE_OVERHEAD,
    CUBE_EFFICIENCY,
    CUBE_OVERHEAD,
    L2_RATIO,
    LINK_EFFICIENCY,
    MEMORY_EFFICIENCY,
    MESH_DEVICES,
    VECTOR_OVERHEAD,
)
from draftwood.compiler.device.operators import Op
from draftwood.errors import RequestError
from draftwood.trees.latency import Assumption, Mark

_MSMODELING = "Ascend/msmodeling, tensor_cast/device.py, profile"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """Peak figures of one device; a 910C counts as one of its two dies."""

    name: str
    # As ATC's --soc_version wants it.
    soc: str
    # Matrix units, bf16, and vector units, fp16, in FLOP/s.
    cube: float
    vector: float
    # HBM, in bytes/s and bytes.
    bandwidth: float
    memory: int
    # Links to the other devices of a machine: bytes/s that a device sends over all of them, seconds of a hop, and
    # whether they are a full mesh.
    link: float
    hop: float
    mesh: bool
    # Where the figures come from.
    profile: str
    mark: Mark

    def seconds(self, op: Op) -> float:
        """One run of `op` without its fixed cost: whichever of its four loads takes longest."""
        if op.engine == "link":
            return min(hops * self.hop + sent / self._sends(op.ranks) for hops, sent in op.sent)
        hbm = self.bandwidth * MEMORY_EFFICIENCY.value
        return max(
            op.memory / hbm,
            op.exchange / (hbm * L2_RATIO.value),
            op.cube / (self.cube * CUBE_EFFICIENCY.value),
            op.vector / (self.vector * CUBE_EFFICIENCY.value),
        )

    def _sends(self, ranks: int) -> float:
        """Bytes/s that a device sends to ``ranks`` - 1 others."""
        share = min((ranks - 1) / (MESH_DEVICES.value - 1), 1.0) if self.mesh else 1.0
        return self.link * LINK_EFFICIENCY.value * share

    def streams(self, op: Op) -> bool:
        """Whether a matrix product waits for its weights rather than for the cube."""
        return op.memory / (self.bandwidth * MEMORY_EFFICIENCY.value) >= op.cube / (self.cube * CUBE_EFFICIENCY.value)

    def constants(self, ranks: int = 1) -> tuple[Assumption, ...]:
        """This device's figures, as a table lists them; with several ``ranks`` also those of its links."""
        figures = {
            "bf16 peak of the cube": (self.cube, "FLOP/s"),
            "fp16 peak of the vector cores": (self.vector, "FLOP/s"),
            "peak memory bandwidth": (self.bandwidth, "bytes/s"),
        }
        if ranks > 1:
            figures["peak bandwidth of all links"] = (self.link, "bytes/s")
            figures["time of a hop between devices"] = (self.hop, "s")
        return tuple(
            Assumption(name=name, value=value, unit=unit, mark=self.mark, source=self.profile)
            for name, (value, unit) in figures.items()
        )


_FIXED = {"vector": VECTOR_OVERHEAD, "link": COLLECTIVE_OVERHEAD}
_TIB, _GIB = 2**40, 2**30
# GB/s, microseconds of a hop, full mesh: of such a machine's interconnect in the same file.
_A2, _PCIE, _A3 = (196, 0.5, True), (64, 0.2, False), (196, 0.5, False)
_STAND_IN = "no public profile of it was found: the figures of the 910B2, the next smaller part, stand in for it"
_SPECS: tuple[tuple[str, str, float, float, float, int, tuple[float, float, bool], str, Mark], ...] = (
    # name, soc, cube and vector in TFLOPS, TiB/s, GiB, links, profile, mark
    ("ascend-910b1", "Ascend910B1", 353.9, 22, 1.6, 64, _A2, _STAND_IN, "assumption"),
    ("ascend-910b2", "Ascend910B2", 353.9, 22, 1.6, 64, _A2, f"{_MSMODELING} A2_376T_64G", "vendor simulator"),
    ("ascend-910b3", "Ascend910B3", 294.9, 18, 1.6, 64, _A2, f"{_MSMODELING} A2_313T_64G", "vendor simulator"),
    ("ascend-910b4", "Ascend910B4", 245.8, 16, 0.8, 32, _PCIE, f"{_MSMODELING} A2_280T_32G_PCIE", "vendor simulator"),
    ("ascend-910c", "Ascend910_9391", 353.9, 22, 1.6, 64, _A3, f"{_MSMODELING} A3_752T_128G_DIE", "vendor simulator"),
)
_DEVICES = (
    DeviceSpec(
        name=name,
        soc=soc,
        cube=cube * 1e12,
        vector=vector * 1e12,
        bandwidth=bandwidth * _TIB,
        memory=memory * _GIB,
        link=link * 1e9,
        hop=hop * 1e-6,
        mesh=mesh,
        profile=profile,
        mark=mark,
    )
    for name, soc, cube, vector, bandwidth, memory, (link, hop, mesh), profile, mark in _SPECS
)
DEVICES = {device.name: device for device in _DEVICES}


def device(name: str) -> DeviceSpec:
    """The device of a name; RequestError lists them."""
    if name not in DEVICES:
        raise RequestError(f"--device {name}: not known; expected one of {', '.join(DEVICES)}")
    return DEVICES[name]


def parts(device: DeviceSpec, ops: Iterable[Op]) -> dict[str, float]:
    """Seconds of `ops` by what they are spent on; they add up to the whole.

    A matrix product counts as ``weights`` if it waits for its weights, and as ``compute`` if it waits for the cube.
    ``overhead`` is the operators' fixed cost on the device.
    """
    spent = dict.fromkeys(("weights", "compute", "attention", "vector", "link", "overhead"), 0.0)
    for op in ops:
        fixed = _FIXED.get(op.engine, CUBE_OVERHEAD)
        part = op.engine if op.engine != "matmul" else "weights" if device.streams(op) else "compute"
        spent[part] += op.count * device.seconds(op)
        spent["overhead"] += op.count * fixed.value
    return {part: seconds for part, seconds in spent.items() if seconds or part != "link"}
