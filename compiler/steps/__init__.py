"""What a graph computes: prefill, decode and verify of the teacher, one file each, and their traces."""
