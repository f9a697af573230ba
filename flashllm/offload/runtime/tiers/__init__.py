"""What a run keeps, and on which tier: weights, KV cache, activations; scratch files (paper B, section 4.2)."""
