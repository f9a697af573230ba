"""Things that a run keeps, and their tiers: weights, KV cache, activations; scratch files (paper B, section 4.2)."""
