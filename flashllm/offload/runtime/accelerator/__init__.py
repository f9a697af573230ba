"""The device tier on an accelerator, by torch: the device, its operations, its part of weights and cache."""
