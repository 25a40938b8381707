"""One step of speculative decoding, and what a text has of its own: caches, drafts, draws."""
