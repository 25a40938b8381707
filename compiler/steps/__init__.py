"""What a graph computes: prefill, decode and verify of the teacher, and their traces."""
