"""Texts and pictures of what the tools find."""
