"""GGUF files: the header, where tensors lie, the file and its tensors, what the metadata means, the tokenizer in it."""
