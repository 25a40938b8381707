"""Engines beyond one machine, on Ray."""
