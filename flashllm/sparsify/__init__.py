"""Thresholds on the gate of models whose neurons are never exactly zero: chosen on text, and what they cost."""
