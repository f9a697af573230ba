"""The parts of `train_predictor.py`: a pass over each layer's activity, what is fitted to it, and what both take."""
