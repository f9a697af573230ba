"""Answers about a model directory: what it holds, and whether its bytes are right."""
