"""Experts that a checkpoint holds together, as a tensor for each matrix of each."""
