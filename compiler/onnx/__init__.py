"""What a step becomes for onnxruntime."""
