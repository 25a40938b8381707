"""One step of speculative decoding, and the parts of a text: caches, drafts, draws."""
