"""The targets that a bundle can be built for: the one place where they are listed."""

from __future__ import annotations

from draftwood.compiler.ge.target import GeTarget
from draftwood.compiler.onnx.target import OnnxTarget
from draftwood.compiler.targets.target import Target

# By name, in the order in which a bundle's graph sets are listed.
TARGETS: dict[str, Target] = {target.name: target for target in (OnnxTarget(), GeTarget())}
