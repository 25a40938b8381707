"""Medusa heads (Cai et al., 2024)."""
