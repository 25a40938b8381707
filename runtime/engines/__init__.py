"""What decodes from a bundle alone, one file an engine."""
