"""DSpark (2026, arXiv 2607.05147): DFlash's block with a sequential head of low rank and a confidence head."""
