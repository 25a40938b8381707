"""P-EAGLE (2026, arXiv 2602.01469): EAGLE-3 that drafts all levels in one pass, each from a mask token."""
