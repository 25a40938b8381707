"""The targets that a bundle can be built for: the one place where they are listed."""

from __future__ import annotations

from collections import UserDict
from importlib import import_module
from typing import cast

from draftwood.compiler.targets.target import Target


class _Targets(UserDict[str, Target]):
    """Targets by name, in the order in which a bundle's graph sets are listed. Each is imported when it is asked for,
    so a build for a CPU loads no file of an NPU."""

    def __init__(self, sources: dict[str, str]) -> None:
        super().__init__()
        self._sources = sources
        self.data = cast("dict[str, Target]", dict.fromkeys(sources))

    def __getitem__(self, name: str) -> Target:
        if self.data[name] is None:
            module, target = self._sources[name].split(":")
            self.data[name] = getattr(import_module(module), target)()
        return self.data[name]


TARGETS = _Targets(
    {"onnx": "draftwood.compiler.targets.onnx:OnnxTarget", "ge": "draftwood.compiler.targets.ge:GeTarget"}
)
