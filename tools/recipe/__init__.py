"""Stand-ins for published checkpoints that are too large to try. For development alone."""
