"""Fuzzing: every reader of the project is given files that are wrong on purpose, each in a process of its own."""
