"""From a teacher to the same teacher in W8A8: calibrated, rounded, written, and held against the original."""
