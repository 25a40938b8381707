"""Medusa heads (Cai et al., 2024, arXiv 2401.10774): one guess a level, all from the teacher's last hidden state."""
