"""FastEagle (Huang et al., 2025): a cascade of blocks, one pass."""
