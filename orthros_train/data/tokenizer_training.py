"""Trains tokenizers on raw text: byte-level BPE as a Hugging Face folder, or a SentencePiece model.

* Both encode any text without loss: bytes are the alphabet (BPE) or the fallback (SentencePiece), and nothing is
  normalized.
* Digits stand alone, so a number's length is visible.
* The output appears only when complete.
"""

from __future__ import annotations

import io
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import sentencepiece
import tokenizers as hf
from tokenizers import decoders, models, pre_tokenizers, trainers

from orthros_train.data.documents import decode_batch
from orthros_train.data.progress import Progress
from orthros_train.data.sources import Source, read_all
from orthros_train.data.storage import fsync_path
from orthros_train.data.tokenizers import save_fast_tokenizer
from orthros_train.errors import InputError

Algorithm = Literal["bpe", "sentencepiece-bpe", "sentencepiece-unigram"]

_SPECIAL_TOKENS = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
_ASCII = "".join(map(chr, range(33, 127)))  # ids of their own even where the text lacks them
_MAX_LINE = 4096  # characters of a SentencePiece training line


def train_tokenizer(
    sources: Sequence[Source],
    algorithm: Algorithm,
    vocab_size: int,
    output: Path,
    *,
    text_key: str = "text",
    max_text_bytes: int | None = None,
    overwrite: bool = False,
) -> int:
    """Train a tokenizer and put it at `output`: a folder (bpe) or a .model file (sentencepiece).

    Args:
        sources: the text.
        algorithm: how.
        vocab_size: ids, special tokens included.
        output: appears only when complete.
        text_key: the field of JSON lines that holds the text.
        max_text_bytes: stop reading after about this much text.
        overwrite: replace what is there.

    Returns:
        The ids that the trained tokenizer has: fewer than asked for where a bpe's text holds no more pairs.

    Raises:
        InputError: bad input, an existing output, or a vocabulary that is too small, or too large for the text.
    """
    if output.exists() and not overwrite:
        raise InputError(f"output {output} exists; pass --overwrite or choose another --output")
    if algorithm != "bpe" and output.suffix != ".model":
        raise InputError(f"--output {output} of a SentencePiece model must end in .model")
    texts = _Texts(sources, text_key, max_text_bytes)
    if algorithm == "bpe":
        backend = _train_bpe(texts, vocab_size)
        _publish(output, lambda path: save_fast_tokenizer(backend, path, **_SPECIAL_TOKENS))
        return backend.get_vocab_size()
    model = _train_sentencepiece(texts, vocab_size, algorithm.removeprefix("sentencepiece-"))
    _publish(output, lambda path: path.write_bytes(model))
    return vocab_size


class _Texts:
    """The text of the documents; what went wrong while reading is kept, since SentencePiece replaces it by its own."""

    def __init__(self, sources: Sequence[Source], text_key: str, max_bytes: int | None) -> None:
        self._sources, self._text_key, self._max_bytes = sources, text_key, max_bytes
        self.error: InputError | None = None

    def __iter__(self) -> Iterator[str]:
        try:
            yield from self._read()
        except InputError as error:
            self.error = error
            raise

    def _read(self) -> Iterator[str]:
        text_bytes = 0
        with Progress("read text", sum(source.extent for source in self._sources)) as progress:
            for batch in read_all(self._sources):
                for document in decode_batch(batch, self._text_key):
                    if document.is_blank:
                        continue
                    if self._max_bytes is not None and text_bytes >= self._max_bytes:
                        break
                    text_bytes += document.size_bytes
                    yield document.text
                progress.update(batch.consumed, f"{text_bytes:,} bytes of text")
        if not text_bytes:
            raise InputError("the input holds no document with text")
        print(f"read {text_bytes:,} bytes of text; training", file=sys.stderr, flush=True)


def _train_bpe(texts: _Texts, vocab_size: int) -> hf.Tokenizer:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    least = len(alphabet) + len(_SPECIAL_TOKENS)
    if vocab_size < least:
        raise InputError(f"--vocab-size {vocab_size} is too small: 256 bytes and special tokens take {least}")
    backend = hf.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(_SPECIAL_TOKENS.values()),
        initial_alphabet=alphabet,
        show_progress=sys.stderr.isatty(),
    )
    backend.train_from_iterator(texts, trainer)
    return backend


def _train_sentencepiece(texts: _Texts, vocab_size: int, model_type: str) -> bytes:
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_lines(texts),
            model_writer=model,
            model_type=model_type,
            vocab_size=vocab_size,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            split_digits=True,
            required_chars=_ASCII,
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=3,
            max_sentence_length=4 * _MAX_LINE,
            minloglevel=2,
        )
    except RuntimeError as error:
        if texts.error is not None:
            raise texts.error from error
        reason = str(error).rsplit("] ", maxsplit=1)[-1]
        raise InputError(f"SentencePiece cannot train {vocab_size} ids on this text: {reason}") from error
    return model.getvalue()


def _lines(texts: _Texts) -> Iterator[str]:
    """Lines as SentencePiece takes them; a very long one is cut instead of being left out."""
    for text in texts:
        for line in text.split("\n"):
            for start in range(0, len(line), _MAX_LINE):
                yield line[start : start + _MAX_LINE]


def _publish(output: Path, write: Callable[[Path], object]) -> None:
    """Write to another name, then rename: the output is complete or absent. Raises InputError if it cannot be."""
    partial = output.with_name(f".{output.name}.partial-{os.getpid()}")
    replaced = output.with_name(f".{output.name}.replaced-{os.getpid()}")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        write(partial)
        for path in [*partial.rglob("*"), partial]:
            fsync_path(path)
        if output.is_dir():
            output.rename(replaced)  # a folder cannot be renamed onto another
        partial.replace(output)
        fsync_path(output.parent)
    except OSError as error:
        raise InputError(f"{output} cannot be written: {error.strerror or error}; choose another --output") from error
    finally:
        for path in (partial, replaced):
            if path.is_dir():
                shutil.rmtree(path)
            elif path.exists():
                path.unlink()
