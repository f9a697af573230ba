"""Decided before anything is loaded: where every byte goes, and what a token will take."""
