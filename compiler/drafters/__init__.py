"""Drafters: a folder a kind, known to everything else by the one object that the registry holds of it."""
