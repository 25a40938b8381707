"""What training asks of every kind of drafter, and gives it: a student, its batches and its losses."""
