"""Sources of a conversion's tensors: safetensors, PyTorch's pickled files, GGUF, behind one `Checkpoint`."""
