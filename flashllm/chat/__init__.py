"""A conversation, and the terminal or the pipe it is held through."""
