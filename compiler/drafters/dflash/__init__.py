"""DFlash (2026, arXiv 2602.06036): a block of rows over the text, denoised in one pass."""
