"""Rows as a page, as pictures, as docs/measured.md, and two runs held against each other."""
