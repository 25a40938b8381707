"""Trainers of the demo models: a small teacher with its tokenizer, and drafters for a frozen teacher."""
