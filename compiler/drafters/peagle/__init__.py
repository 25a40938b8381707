"""P-EAGLE (2026, arXiv 2602.01469): EAGLE-3 whose levels are all drafted in one pass, behind a mask token each."""
