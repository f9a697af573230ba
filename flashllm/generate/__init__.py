"""Tokens to text, turn by turn."""
