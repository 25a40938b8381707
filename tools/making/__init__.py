"""``draftwood make``: its stages, their needs, and the choice of the precision."""
