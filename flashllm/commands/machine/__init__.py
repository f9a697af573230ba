"""The verbs about this machine: how fast a model runs on it, and what it lacks."""
