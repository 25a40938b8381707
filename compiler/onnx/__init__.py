"""Lowering of steps to ONNX graphs for onnxruntime."""
