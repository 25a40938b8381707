"""The engines that run a bundle's ONNX graphs through OpenVINO, on Intel's CPUs, GPUs and NPUs."""

from draftwood.runtime.engines.openvino.engine import OpenVinoEngine

__all__ = ["OpenVinoEngine"]
