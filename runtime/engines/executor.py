"""Executes a graph for an engine of static graphs: onnxruntime, an NPU, or an interpreter of the NPU's graphs."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from draftwood.manifest import GraphSignature
from draftwood.runtime.speculation.kv_cache import Buffer, Zeros


class Executor(Protocol):
    """Runs graphs on one device, and has the memory that they read and write there."""

    @property
    def zeros(self) -> Zeros:
        """Makes a buffer of zeros of a shape on the device."""

    def run(self, graph: GraphSignature, inputs: dict[str, NDArray], buffers: dict[str, Buffer]) -> dict[str, NDArray]:
        """Runs a graph; opens it when it is first needed.

        Args:
            inputs: the small inputs by name, in the host's memory.
            buffers: those on the device, by name. Caches are written in place, inputs such as ``branch`` are read
                there, and outputs such as ``branch.out`` stay there.

        Returns:
            The other outputs by name, fp32 or whole numbers in the host's memory, valid until the next run.
        """

    def read(self, buffer: Buffer) -> NDArray[np.float32]:
        """A buffer, or rows of one, in the host's memory."""
