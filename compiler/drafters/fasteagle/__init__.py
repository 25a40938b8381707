"""FastEagle (Huang et al., 2025, arXiv 2509.20416): a cascade of blocks, one pass, a level a block."""
