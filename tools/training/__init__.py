"""Training of a drafter for a frozen teacher: the texts that the teacher writes, its states, and the loop."""
