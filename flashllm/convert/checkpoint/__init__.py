"""Where a conversion's tensors come from: safetensors, PyTorch's pickled files, GGUF, behind one `Checkpoint`."""
