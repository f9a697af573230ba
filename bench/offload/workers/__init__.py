"""One run each in a process of its own: this engine's and its peers'."""
