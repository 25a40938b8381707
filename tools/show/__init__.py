"""Texts and pictures of the tools' results."""
