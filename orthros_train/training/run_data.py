"""The data of a run, as its task wants it."""

from __future__ import annotations

from orthros_train.config import Config
from orthros_train.data import PretrainingData, SplitTooSmallError, Tokenizer
from orthros_train.data.mixed import MixedData
from orthros_train.data.samples import Samples
from orthros_train.data.sft import SFTData


def training_data(config: Config, tokenizer: Tokenizer) -> Samples:
    """The training samples: text, conversations, or both blended by the weights of their sources.

    Raises:
        InputError: a source is refused.
    """
    if config.task == "pretrain":
        return PretrainingData(config, tokenizer, "train")
    conversations = SFTData(config, tokenizer, "train")
    if not config.data.train:
        return conversations
    text = PretrainingData(config, tokenizer, "train")
    weights = (
        sum(source.weight for source in config.data.sft.train),
        sum(source.weight for source in config.data.train),
    )
    return MixedData(conversations, text, weights, config.train.global_batch_size)


def validation_data(config: Config, tokenizer: Tokenizer) -> Samples | None:
    """The validation set, of conversations where any are trained on; None where the training sources have no share for
    one and nobody asked for one.

    Raises:
        InputError: a source is refused.
    """
    sft = config.task == "sft"
    named = config.data.sft.validation if sft else config.data.validation
    try:
        return SFTData(config, tokenizer, "validation") if sft else PretrainingData(config, tokenizer, "validation")
    except SplitTooSmallError:
        if named is None and config.evaluation.interval_steps is None:
            return None
        raise


def conversations_of(data: Samples) -> SFTData | None:
    """The conversations among the samples, or None."""
    data = data.conversations if isinstance(data, MixedData) else data
    return data if isinstance(data, SFTData) else None


def data_notes(data: Samples, tokenizer: Tokenizer) -> list[str]:
    """What a person should know about conversations that a run reads: what was dropped, and what ends a turn."""
    conversations = conversations_of(data)
    if conversations is None:
        return []
    notes = list(conversations.notes)
    end, eos = (tokenizer.decode([id_]) for id_ in (conversations.template.end_of_turn_id, tokenizer.eod_id))
    if end != eos:
        notes.append(
            f"warning: answers end with {end!r}, but the tokenizer's EOS is {eos!r}: name the former as eos_token in "
            "tokenizer_config.json, or generation will not stop by itself"
        )
    return notes
