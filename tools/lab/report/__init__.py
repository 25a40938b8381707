"""Rows as Markdown with pictures, of which docs/measured.md is one."""
