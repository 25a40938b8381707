"""What a teacher is: its configuration, its checkpoint and its network, one file a family."""
