"""``draftwood make``: its stages, what they need, and the precision that is chosen."""
