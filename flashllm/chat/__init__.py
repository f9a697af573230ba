"""A conversation, and the terminal it is held at."""
