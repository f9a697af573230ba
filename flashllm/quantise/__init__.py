"""Codes of 8 and 4 bits that lose less: chosen by what a model's matrices see of a text (`convert --calibrate`)."""
