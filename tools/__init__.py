"""The command line, training, benchmarks and pictures: thin callers of what lies below."""
