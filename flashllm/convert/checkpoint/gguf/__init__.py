"""GGUF files: a check of the header, the file and its tensors, what the metadata means, the tokenizer in it."""
