"""The model as a Hugging Face causal LM. Imports torch and transformers; nothing below does."""
