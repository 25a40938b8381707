"""The description of a family of teachers; ``registry`` lists them.

A family is a subclass of the class below. If its network differs, ``decoder`` is a subclass of ``Decoder`` with other
layers, and ``config`` a subclass of ``TeacherConfig`` with the fields that they need.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import numpy as np

from draftwood.compiler.checkpoints.fields import Fields
from draftwood.compiler.checkpoints.weight import WeightParts
from draftwood.compiler.teachers.config import TeacherConfig
from draftwood.compiler.teachers.decoder import Decoder
from draftwood.compiler.teachers.rope import rope_tables


class Family(ABC):
    """Teachers of one architecture: the reading of their config.json, their published tensors, and their function."""

    # The name in TeacherConfig.family and in a bundle's manifest.
    name: ClassVar[str]
    # The class that config.json names under ``architectures``.
    architecture: ClassVar[str]
    # The accepted values of ``model_type``; empty accepts any.
    model_types: ClassVar[tuple[str, ...]] = ()
    config: ClassVar[type[TeacherConfig]] = TeacherConfig
    decoder: ClassVar[type[Decoder]] = Decoder

    @abstractmethod
    def values(self, fields: Fields) -> dict[str, Any]:
        """The arguments of ``config`` from config.json; CheckpointError names a field that is not supported."""

    @abstractmethod
    def parts(self, config: TeacherConfig) -> dict[str, WeightParts]:
        """Our weight name -> the published tensors that make it, in the order of the forward pass."""

    def ignores(self, config: TeacherConfig, name: str) -> bool:
        """Whether a published tensor is known to be of no use."""
        return False

    def tables(self, config: TeacherConfig, positions: int) -> dict[str, np.ndarray]:
        """The decoder's buffers by name: float32 [positions, head_dim], cosine and sine of every position."""
        return dict(zip(("rope_cos", "rope_sin"), rope_tables(config, positions), strict=True))
