"""Evaluation suites: what is asked of a model, where the data comes from, and how an answer is judged."""
