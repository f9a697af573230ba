"""From a checkpoint to a model directory."""
