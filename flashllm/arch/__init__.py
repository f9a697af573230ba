"""Differences between architectures: one file a Hugging Face model_type, and the table of them."""
