"""EAGLE-3 (Li et al., 2025): one block, run once a level."""
