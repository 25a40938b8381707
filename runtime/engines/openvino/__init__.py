"""The engines that run a bundle's ONNX graphs through OpenVINO, on Intel's CPUs, GPUs and NPUs."""

from draftwood.runtime.engines.openvino.engine import OpenVinoEngine, on_cpu, on_gpu, on_npu

__all__ = ["OpenVinoEngine", "on_cpu", "on_gpu", "on_npu"]
