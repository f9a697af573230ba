"""Other dialects than OpenAI's chat completions: a module each, to that inner form and back."""
