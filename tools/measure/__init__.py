"""Experiments: what is measured, each with a command of its own."""
