"""A model's answer as what it says: text, reasoning, and calls of tools. Knows no model, no tokenizer, no transport."""
