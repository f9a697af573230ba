"""Weights that lose less when they are packed: rounded to the groups' grid with feedback of the error, on real text."""
