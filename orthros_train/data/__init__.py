"""Tokenizers, preprocessing and samples for training."""

from orthros_train.data.pretraining import PretrainingData, Sample, SplitTooSmallError, collate
from orthros_train.data.sampler import batch_indices, rank_micro_batches
from orthros_train.data.tokenizers import Tokenizer, load_tokenizer

__all__ = [
    "PretrainingData",
    "Sample",
    "SplitTooSmallError",
    "Tokenizer",
    "batch_indices",
    "collate",
    "load_tokenizer",
    "rank_micro_batches",
]
