"""Weights of quantised checkpoints, kept as they are: which ones can be, and their bytes."""
