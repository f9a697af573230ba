"""The parts of `relufy.py`: a student with FATReLU, the refit of its down projections, its distillation, its text."""
