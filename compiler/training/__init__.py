"""The contract between training and a kind of drafter: a student, its batches and its losses."""
