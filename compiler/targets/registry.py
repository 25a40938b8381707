"""The targets that a bundle can be built for: the one place where they are listed."""

from __future__ import annotations

from draftwood.compiler.targets.ge import GeTarget
from draftwood.compiler.targets.onnx import OnnxTarget
from draftwood.compiler.targets.target import Target

# By name, in the order in which a bundle's graph sets are listed.
TARGETS: dict[str, Target] = {target.name: target for target in (OnnxTarget(), GeTarget())}
