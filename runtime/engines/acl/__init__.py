"""Runs a bundle's NPU graphs from ``.om`` files on AscendCL, with neither torch nor torch_npu."""

from draftwood.runtime.engines.acl.engine import AclEngine, is_ready

__all__ = ["AclEngine", "is_ready"]
