"""A SentencePiece model as a `tokenizers` object with the same ids, for Hugging Face folders.

SentencePiece normalizes the whole text (character map, white space, a leading "▁"), then segments it by
the best-scored merge (bpe) or the best path (unigram); each step has its counterpart in `tokenizers`.

* The merge of two pieces ranks by the score of the piece that they form.
* Control pieces become special tokens; with special-token parsing off, text that spells one out is its characters.
* User-defined pieces are cut out of the normalized text, the longest first, before the rest is segmented.
* Of two paths with equal score unigram may take the other one (SentencePiece adds in float32, `tokenizers` in float64);
  seen only in artificial runs of one letter.
"""

from __future__ import annotations

import re
from typing import Any

import tokenizers as hf
from sentencepiece import sentencepiece_model_pb2
from tokenizers import decoders, models, normalizers, pre_tokenizers

from orthros_train.errors import InputError

_SPACE = "▁"
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # ModelProto.SentencePiece.Type
_IN_TEXT = {_NORMAL, _USER_DEFINED}  # what text can turn into; "</s>" and "<0x0A>" spelled out are their characters
_NEVER = -1e5  # a unigram score below that of any path of known characters
_UNIGRAM, _BPE = 1, 2  # TrainerSpec.ModelType


def parse_sentencepiece(serialized_model: bytes) -> Any:
    """Parse a serialized ModelProto that can be converted.

    Raises:
        InputError: a kind of model that the Hugging Face format cannot express (word, char, white space as suffix).
    """
    model_proto: Any = sentencepiece_model_pb2  # its classes are made at run time
    model = model_proto.ModelProto.FromString(serialized_model)
    trainer = model.trainer_spec
    if trainer.model_type not in {_UNIGRAM, _BPE} or trainer.treat_whitespace_as_suffix:
        raise InputError(
            "a SentencePiece model of type word or char, or with white space as suffix, has no Hugging Face "
            "counterpart; train a unigram or bpe model with tools/train_tokenizer.py"
        )
    return model


def convert_sentencepiece(serialized_model: bytes) -> tuple[hf.Tokenizer, dict[str, str]]:
    """Convert a serialized ModelProto.

    Returns:
        The tokenizer, and its special tokens by their Hugging Face names (unk_token, bos_token, …).

    Raises:
        InputError: as `parse_sentencepiece`.
    """
    model = parse_sentencepiece(serialized_model)
    trainer = model.trainer_spec
    tokenizer = hf.Tokenizer(_segmenter(model))
    tokenizer.normalizer = _normalizer(model.normalizer_spec)
    if user_defined := _user_defined(model):
        longest_first = sorted(user_defined, key=len, reverse=True)
        pattern = hf.Regex("|".join(re.escape(piece) for piece in longest_first))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(pattern, behavior="isolated")
    tokenizer.decoder = _decoder(strip_prefix=model.normalizer_spec.add_dummy_prefix)
    control = [piece.piece for piece in model.pieces if piece.type == _CONTROL]
    tokenizer.add_special_tokens([hf.AddedToken(token, normalized=False, special=True) for token in control])
    ids = {
        "unk_token": trainer.unk_id,
        "bos_token": trainer.bos_id,
        "eos_token": trainer.eos_id,
        "pad_token": trainer.pad_id,
    }
    return tokenizer, {name: model.pieces[index].piece for name, index in ids.items() if index >= 0}


def _segmenter(model: Any) -> Any:
    """The unigram or bpe model that finds the best segmentation."""
    trainer = model.trainer_spec
    if trainer.model_type == _UNIGRAM:
        scored = [(piece.piece, piece.score if piece.type in _IN_TEXT else _NEVER) for piece in model.pieces]
        return models.Unigram(scored, unk_id=trainer.unk_id, byte_fallback=trainer.byte_fallback)
    vocabulary = {piece.piece: index for index, piece in enumerate(model.pieces)}
    return models.BPE(
        vocab=vocabulary,
        merges=_merges(model, vocabulary),
        unk_token=model.pieces[trainer.unk_id].piece,
        fuse_unk=True,
        byte_fallback=trainer.byte_fallback,
        ignore_merges=bool(_user_defined(model)),  # a piece cut out of the text is one token without merges
    )


def _user_defined(model: Any) -> list[str]:
    return [piece.piece for piece in model.pieces if piece.type == _USER_DEFINED]


def _merges(model: Any, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """Every pair of pieces that forms a piece, the best-scored result first.

    Among equal scores the longest left part goes first, then the shortest right one: SentencePiece takes the leftmost
    pair, so that runs of one character (the spaces of Llama 2, all with one score) grow from the left.
    """
    ranked: list[tuple[float, int, int, tuple[str, str]]] = []
    for piece in model.pieces:
        text = piece.piece if piece.type in _IN_TEXT else ""
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in vocabulary and right in vocabulary:
                ranked.append((-piece.score, -len(left), len(right), (left, right)))
    return [pair for *_, pair in sorted(ranked)]


def _normalizer(spec: Any) -> Any:
    """Character map, white-space removal, the leading "▁", and spaces written as "▁", in that order."""
    steps: list[Any] = []
    if spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        steps.append(normalizers.Replace(hf.Regex("^ +| +$"), ""))
        steps.append(normalizers.Replace(hf.Regex(" {2,}"), " "))
    if spec.add_dummy_prefix:
        steps.append(normalizers.Prepend(_SPACE))
    steps.append(normalizers.Replace(" ", _SPACE))
    return normalizers.Sequence(steps)


def _decoder(*, strip_prefix: bool) -> Any:
    """Turn "▁" back to spaces, byte pieces back to characters, and drop the leading space."""
    steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if strip_prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    return decoders.Sequence(steps)
