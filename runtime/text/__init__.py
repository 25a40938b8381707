"""Text to token ids and back, and chat messages to text."""
