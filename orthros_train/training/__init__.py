"""Training: the engine, its schedule, checkpoints, metrics and the loop that `python -m orthros_train` runs."""
