"""The devices that can be modelled, with their public figures, and what one spends on operators."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from draftwood.compiler.device.constants import (
    CUBE_EFFICIENCY,
    CUBE_OVERHEAD,
    L2_RATIO,
    MEMORY_EFFICIENCY,
    VECTOR_OVERHEAD,
)
from draftwood.compiler.device.operators import Op
from draftwood.errors import RequestError
from draftwood.trees.latency import Constant, Mark

_MSMODELING = "Ascend/msmodeling, tensor_cast/device.py, profile"


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
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
    # Where the figures come from.
    profile: str
    mark: Mark

    def seconds(self, op: Op) -> float:
        """One run of `op` without its fixed cost: whichever of its four loads takes longest."""
        hbm = self.bandwidth * MEMORY_EFFICIENCY.value
        return max(
            op.memory / hbm,
            op.exchange / (hbm * L2_RATIO.value),
            op.cube / (self.cube * CUBE_EFFICIENCY.value),
            op.vector / (self.vector * CUBE_EFFICIENCY.value),
        )

    def streams(self, op: Op) -> bool:
        """Whether a matrix product waits for its weights rather than for the cube."""
        return op.memory / (self.bandwidth * MEMORY_EFFICIENCY.value) >= op.cube / (self.cube * CUBE_EFFICIENCY.value)

    def constants(self) -> tuple[Constant, ...]:
        """This device's figures, as a table lists them."""
        figures = {
            "bf16 peak of the cube": (self.cube, "FLOP/s"),
            "fp16 peak of the vector cores": (self.vector, "FLOP/s"),
            "peak memory bandwidth": (self.bandwidth, "bytes/s"),
        }
        return tuple(
            Constant(name=name, value=value, unit=unit, mark=self.mark, source=self.profile)
            for name, (value, unit) in figures.items()
        )


_TIB, _GIB = 2**40, 2**30
_STAND_IN = "no public profile of it was found: the figures of the 910B2, the next smaller part, stand in for it"
_SPECS: tuple[tuple[str, str, float, float, float, int, str, Mark], ...] = (
    # name, soc, cube and vector in TFLOPS, TiB/s, GiB, profile, mark
    ("ascend-910b1", "Ascend910B1", 353.9, 22, 1.6, 64, _STAND_IN, "assumption"),
    ("ascend-910b2", "Ascend910B2", 353.9, 22, 1.6, 64, f"{_MSMODELING} A2_376T_64G", "vendor simulator"),
    ("ascend-910b3", "Ascend910B3", 294.9, 18, 1.6, 64, f"{_MSMODELING} A2_313T_64G", "vendor simulator"),
    ("ascend-910b4", "Ascend910B4", 245.8, 16, 0.8, 32, f"{_MSMODELING} A2_280T_32G_PCIE", "vendor simulator"),
    ("ascend-910c", "Ascend910_9391", 353.9, 22, 1.6, 64, f"{_MSMODELING} A3_752T_128G_DIE", "vendor simulator"),
)
_DEVICES = (
    Device(
        name=name,
        soc=soc,
        cube=cube * 1e12,
        vector=vector * 1e12,
        bandwidth=bandwidth * _TIB,
        memory=memory * _GIB,
        profile=profile,
        mark=mark,
    )
    for name, soc, cube, vector, bandwidth, memory, profile, mark in _SPECS
)
DEVICES = {device.name: device for device in _DEVICES}


def device(name: str) -> Device:
    """The device of a name; RequestError lists them."""
    if name not in DEVICES:
        raise RequestError(f"--device {name}: not known; expected one of {', '.join(DEVICES)}")
    return DEVICES[name]


def parts(device: Device, ops: Iterable[Op]) -> dict[str, float]:
    """Seconds of `ops` by what they are spent on; they add up to the whole.

    A matrix product counts as ``weights`` where it waits for its weights and as ``compute`` where it waits for
    the cube; ``overhead`` is the operators' fixed cost on the device.
    """
    spent = dict.fromkeys(("weights", "compute", "attention", "vector", "overhead"), 0.0)
    for op in ops:
        fixed = VECTOR_OVERHEAD if op.engine == "vector" else CUBE_OVERHEAD
        part = op.engine if op.engine != "matmul" else "weights" if device.streams(op) else "compute"
        spent[part] += op.count * device.seconds(op)
        spent["overhead"] += op.count * fixed.value
    return spent
