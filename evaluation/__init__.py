"""What is measured of a trained model: cache check, likelihoods, prefill time, reports."""
