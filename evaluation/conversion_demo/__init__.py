"""What `make demo-convert` measures and reports; it shares its steps and its training with `evaluation.demo`."""
