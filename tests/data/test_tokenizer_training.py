"""Trained tokenizers: what they promise about text, and that they appear only when complete."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from orthros_train.config import TokenizerSection
from orthros_train.data.documents import DocumentFormat
from orthros_train.data.sources import Source, file_sources
from orthros_train.data.tokenizer_training import Algorithm, train_tokenizer
from orthros_train.data.tokenizers import Tokenizer, load_tokenizer
from orthros_train.errors import InputError

_RANDOM = random.Random(0)
_WORDS = ["".join(_RANDOM.choices("abcdefgh", k=_RANDOM.randint(2, 7))) for _ in range(60)]
TEXT = "\n".join(" ".join(_RANDOM.choices(_WORDS, k=8)) for _ in range(200))
UNSEEN = "  Ünseen\n\n\t日本 🎉 <eos> </s> 2024\r\n "
ALGORITHMS: list[Algorithm] = ["bpe", "sentencepiece-bpe", "sentencepiece-unigram"]


@pytest.fixture
def sources(tmp_path: Path) -> list[Source]:
    (tmp_path / "a.txt").write_text(TEXT)
    return file_sources([tmp_path / "a.txt"], DocumentFormat())


def output(folder: Path, algorithm: Algorithm) -> Path:
    return folder / ("t" if algorithm == "bpe" else "t.model")


def load(path: Path) -> Tokenizer:
    kind = "sentencepiece" if path.suffix == ".model" else "huggingface"
    return load_tokenizer(TokenizerSection.model_validate({"type": kind, "path": str(path)}))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_trained_tokenizer_loses_nothing_and_has_learned(
    algorithm: Algorithm, sources: list[Source], tmp_path: Path
) -> None:
    path = output(tmp_path / "out", algorithm)
    size = train_tokenizer(sources, algorithm, 400, path)
    tokenizer = load(path)
    assert tokenizer.vocab_size == size == 400
    assert [found.name for found in path.parent.iterdir()] == [path.name]
    for text in (TEXT, UNSEEN):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.eod_id not in ids
    assert len(tokenizer.encode(TEXT)) < 0.7 * len(TEXT)
    tokenizer.save_pretrained(tmp_path / "saved")
    saved = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert None not in (saved.bos_token_id, saved.eos_token_id, saved.pad_token_id)
    assert saved(UNSEEN, add_special_tokens=False, split_special_tokens=True).input_ids == tokenizer.encode(UNSEEN)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_training_is_repeatable(algorithm: Algorithm, sources: list[Source], tmp_path: Path) -> None:
    paths = [output(tmp_path / name, algorithm) for name in "xy"]
    for path in paths:
        train_tokenizer(sources, algorithm, 390, path)
    assert load(paths[0]).fingerprint == load(paths[1]).fingerprint


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_bad_input_while_reading_leaves_nothing(algorithm: Algorithm, sources: list[Source], tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_bytes(b"caf\xe9")
    bad = file_sources([tmp_path / "a.txt", tmp_path / "b.txt"], DocumentFormat())
    with pytest.raises(InputError, match=r"b.txt, document 1: invalid UTF-8"):
        train_tokenizer(bad, algorithm, 300, output(tmp_path / "out", algorithm))
    assert not (tmp_path / "out").exists()


def test_an_existing_output_is_kept_unless_told(sources: list[Source], tmp_path: Path) -> None:
    for algorithm in ALGORITHMS[:2]:
        path = output(tmp_path / "out", algorithm)
        train_tokenizer(sources, algorithm, 390, path)
        with pytest.raises(InputError, match="exists; pass --overwrite"):
            train_tokenizer(sources, algorithm, 400, path)
        assert load(path).vocab_size == 390
        train_tokenizer(sources, algorithm, 400, path, overwrite=True)
        assert load(path).vocab_size == 400
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["t", "t.model"]


def test_reading_stops_after_the_asked_amount(sources: list[Source], tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("zyzzyva " * 1000)
    both = file_sources([tmp_path / "a.txt", tmp_path / "b.txt"], DocumentFormat())
    counts = []
    for limit in (None, 10):
        train_tokenizer(both, "bpe", 300, tmp_path / str(limit), max_text_bytes=limit)
        counts.append(len(load(tmp_path / str(limit)).encode("zyzzyva")))
    assert counts[0] < counts[1]


@pytest.mark.parametrize(
    ("algorithm", "vocab_size", "name", "message"),
    [
        ("bpe", 258, "t", "too small: 256 bytes and special tokens take 259"),
        (
            "sentencepiece-bpe",
            200,
            "t.model",
            "SentencePiece cannot train 200 ids on this text: Vocabulary size is smaller",
        ),
        ("sentencepiece-unigram", 9000, "t.model", "cannot train 9000 ids on this text: Vocabulary size too high"),
        ("sentencepiece-bpe", 400, "t", "must end in .model"),
    ],
)
def test_bad_arguments(
    algorithm: Algorithm, vocab_size: int, name: str, message: str, sources: list[Source], tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        train_tokenizer(sources, algorithm, vocab_size, tmp_path / name)
    assert not (tmp_path / name).exists()


def test_a_bpe_of_little_text_says_how_many_ids_it_has(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("ab")
    assert train_tokenizer(file_sources([tmp_path / "a.txt"], DocumentFormat()), "bpe", 300, tmp_path / "t") == 260


def test_no_text_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(" \n")
    with pytest.raises(InputError, match="no document with text"):
        train_tokenizer(
            file_sources([tmp_path / "a.txt"], DocumentFormat()), "sentencepiece-bpe", 300, tmp_path / "t.model"
        )
