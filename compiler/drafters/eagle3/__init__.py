"""EAGLE-3 (Li et al., 2025, arXiv 2503.01840): one block over states inside the teacher, run once a level."""
