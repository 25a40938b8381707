"""The steps that graphs compute: prefill, decode and verify of the teacher, one file each, and their traces."""
