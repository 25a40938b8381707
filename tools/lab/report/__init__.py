"""Rows as a page, as pictures and as docs/measured.md."""
