"""What the benchmarks share: results that can be compared, the models they time, peak memory, profiles."""
