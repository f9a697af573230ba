"""The model directory: its files, what they hold, and how they are checked."""
