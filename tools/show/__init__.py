"""Texts of what the tools find."""
