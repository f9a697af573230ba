"""Models in fewer bits, or with fewer neurons: codes and thresholds chosen on a text, and what they cost."""
