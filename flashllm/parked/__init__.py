"""Conversations on disk: their tokens with their keys and values, so that nothing has to be computed again."""
