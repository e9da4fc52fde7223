"""Orthros: language models with a sliding-window base stream and a full-history output stream (arXiv 2610.13735)."""
