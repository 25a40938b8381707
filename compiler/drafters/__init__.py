"""What proposes tokens: one folder a kind of drafter."""
