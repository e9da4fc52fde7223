"""Tokenizers: ids, round trips, special tokens spelled out in text, Hugging Face folders, bad definitions."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers as hf
from hypothesis import given, settings
from hypothesis import strategies as st
from sentencepiece import sentencepiece_model_pb2
from tokenizers import models, pre_tokenizers
from transformers import AutoTokenizer

from orthros_train.config import TokenizerSection
from orthros_train.data.tokenizers import (
    ByteTokenizer,
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    load_tokenizer,
    special_token_ids,
)
from orthros_train.errors import InputError

TEXT = "The quick  brown fox\n\tjumps over 42 lazy dogs. Ünïcode: 日本語 🎉 \x00 end "
WORDS = [f"{a} {b} {c}. the then there {c}{a}" for a in ("ab", "ba", "abc") for b in ("x1", "y2") for c in ("no", "on")]
WORDS.append(" ".join(map(chr, range(33, 127))))  # every ASCII character has a piece
UNICODE = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)  # no lone surrogates


def train_sentencepiece(**options: Any) -> bytes:
    model = io.BytesIO()
    settings_ = {
        "vocab_size": 420,
        "character_coverage": 1.0,
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "hard_vocab_limit": False,
        "minloglevel": 2,
    }
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(WORDS), model_writer=model, **{**settings_, **options}
    )
    return model.getvalue()


def huggingface_folder(folder: Path, *, eos: str | None = "<eos>", special: bool = True, **config: Any) -> Path:
    """A byte-level BPE without merges; <eos> is an added token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = hf.Tokenizer(models.BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = hf.decoders.ByteLevel()
    backend.add_tokens([hf.AddedToken("<eos>", special=special)])
    folder.mkdir(parents=True)
    backend.enable_truncation(5)  # a definition may carry both; neither may touch a document
    backend.enable_padding(length=50)
    backend.save(str(folder / "tokenizer.json"))
    if eos is not None:
        config["eos_token"] = eos
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def section(kind: str, path: Path) -> TokenizerSection:
    return TokenizerSection.model_validate({"type": kind, "path": str(path)})


# ---- bytes


@given(UNICODE)
def test_byte_ids_are_the_utf8_bytes_and_come_back(text: str) -> None:
    tokenizer = load_tokenizer(TokenizerSection())
    ids = tokenizer.encode(text)
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text


def test_byte_special_tokens() -> None:
    tokenizer = ByteTokenizer()
    assert (tokenizer.vocab_size, tokenizer.eod_id) == (259, 257)
    assert tokenizer.decode([104, 105, 257]) == "hi<eos>"
    assert tokenizer.eod_id not in tokenizer.encode("<eos><bos><pad>")


@settings(max_examples=50)
@given(text=UNICODE)
def test_saved_byte_folder_has_the_same_ids(text: str, byte_folder: Any) -> None:
    assert byte_folder(text, split_special_tokens=True).input_ids == ByteTokenizer().encode(text)
    assert byte_folder.decode(byte_folder(text, split_special_tokens=True).input_ids) == text


@pytest.fixture(scope="module")
def byte_folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("byte")
    ByteTokenizer().save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def test_saved_byte_folder_names_its_special_tokens(byte_folder: Any) -> None:
    assert (byte_folder.bos_token_id, byte_folder.eos_token_id, byte_folder.pad_token_id) == (256, 257, 258)
    assert len(byte_folder) == 259


# ---- SentencePiece


@pytest.mark.parametrize(
    "options",
    [
        {"model_type": "bpe"},
        {"model_type": "unigram"},
        {"model_type": "bpe", "add_dummy_prefix": False},
        {"model_type": "bpe", "user_defined_symbols": ["<sep>", "then"]},
        {"model_type": "unigram", "normalization_rule_name": "nmt_nfkc", "remove_extra_whitespaces": True},
        {"model_type": "bpe", "byte_fallback": False, "vocab_size": 160},
    ],
    ids=["bpe", "unigram", "no-prefix", "user-defined", "nfkc", "no-byte-fallback"],
)
def test_saved_sentencepiece_folder_has_the_same_ids(options: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "m.model").write_bytes(train_sentencepiece(**options))
    tokenizer = load_tokenizer(section("sentencepiece", tmp_path / "m.model"))
    tokenizer.save_pretrained(tmp_path / "folder")
    saved = AutoTokenizer.from_pretrained(tmp_path / "folder")
    assert len(saved) == tokenizer.vocab_size
    assert saved.eos_token_id == tokenizer.eod_id

    text_ = st.one_of(
        UNICODE,
        st.text("abcnxyo12 .<sep>\n▁", max_size=40),
        st.sampled_from([*WORDS, TEXT, "", " a", "  ", "<0x0A></s><unk>"]),
    )

    @settings(max_examples=100, deadline=None)
    @given(text_)
    def same_ids(text: str) -> None:
        assert saved(text, add_special_tokens=False, split_special_tokens=True).input_ids == tokenizer.encode(text)

    same_ids()


def test_runs_of_spaces_are_cut_alike(tmp_path: Path) -> None:
    """Runs of spaces with one score for all lengths, 15 missing, as in Llama 2's and Mistral's models."""
    proto: Any = sentencepiece_model_pb2
    model = proto.ModelProto.FromString(train_sentencepiece(model_type="bpe"))
    for length in (2, 4, 8, 5, 16, 6, 12, 13, 10, 14, 3, 9, 7, 11):
        model.pieces.add(piece="▁" * length, score=-1e9)
    (tmp_path / "m.model").write_bytes(model.SerializeToString())
    tokenizer = SentencePieceTokenizer(tmp_path / "m.model")
    tokenizer.save_pretrained(tmp_path / "folder")
    saved = AutoTokenizer.from_pretrained(tmp_path / "folder")
    for length in range(80):
        text = f"ab{' ' * length}ba"
        assert saved(text, add_special_tokens=False).input_ids == tokenizer.encode(text)


def test_sentencepiece_round_trip_and_spelled_out_specials(tmp_path: Path) -> None:
    (tmp_path / "m.model").write_bytes(train_sentencepiece(model_type="bpe"))
    tokenizer = SentencePieceTokenizer(tmp_path / "m.model")
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert tokenizer.eod_id not in tokenizer.encode("a </s> b<s>")


# ---- Hugging Face folders


def test_huggingface_folder(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(section("huggingface", huggingface_folder(tmp_path / "t")))
    assert (tokenizer.vocab_size, tokenizer.eod_id) == (257, 256)
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT  # neither truncated nor padded
    assert tokenizer.eod_id not in tokenizer.encode("a <eos> b")
    tokenizer.save_pretrained(tmp_path / "copy")
    copy = load_tokenizer(section("huggingface", tmp_path / "copy" / "tokenizer.json"))  # the file's own path works too
    assert copy.fingerprint == tokenizer.fingerprint
    saved = AutoTokenizer.from_pretrained(tmp_path / "copy")
    assert saved(TEXT, split_special_tokens=True, truncation=False).input_ids == tokenizer.encode(TEXT)


def test_an_added_token_that_is_not_special_stays_one_token(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(section("huggingface", huggingface_folder(tmp_path / "t", special=False)))
    assert tokenizer.encode("<eos>") == [256]  # which preprocessing then refuses inside a document


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
def test_eos_may_be_an_object_in_either_file(name: str, tmp_path: Path) -> None:
    folder = huggingface_folder(tmp_path / "t", eos=None)
    (folder / name).write_text(json.dumps({"eos_token": {"content": "<eos>", "lstrip": False}}))
    assert load_tokenizer(section("huggingface", folder)).eod_id == 256


# ---- fingerprints


def test_fingerprints_follow_the_definition(tmp_path: Path) -> None:
    folder = huggingface_folder(tmp_path / "t")
    first = load_tokenizer(section("huggingface", folder)).fingerprint
    definition = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(definition, indent=4, sort_keys=True))
    assert load_tokenizer(section("huggingface", folder)).fingerprint == first  # layout does not count
    definition["pre_tokenizer"]["add_prefix_space"] = True
    (folder / "tokenizer.json").write_text(json.dumps(definition))
    assert load_tokenizer(section("huggingface", folder)).fingerprint != first


def test_fingerprint_changes_with_the_eos(tmp_path: Path) -> None:
    first = load_tokenizer(section("huggingface", huggingface_folder(tmp_path / "1")))
    second = load_tokenizer(section("huggingface", huggingface_folder(tmp_path / "2", eos="A")))
    assert first.fingerprint != second.fingerprint


# ---- bad definitions


def test_missing_files_name_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="missing; train one with tools/train_tokenizer"):
        load_tokenizer(section("sentencepiece", tmp_path / "m.model"))
    with pytest.raises(InputError, match=r"missing; name a folder that holds tokenizer.json"):
        load_tokenizer(section("huggingface", tmp_path))
    (tmp_path / "tokenizer.model").touch()
    with pytest.raises(InputError, match=r"set tokenizer.type: sentencepiece .*tokenizer.model"):
        load_tokenizer(section("huggingface", tmp_path))


def test_broken_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "m.model").write_bytes(b"no model")
    with pytest.raises(InputError, match="no SentencePiece model"):
        load_tokenizer(section("sentencepiece", tmp_path / "m.model"))
    folder = huggingface_folder(tmp_path / "t")
    for content in ("{", "[]", '{"model": 1}'):
        (folder / "tokenizer.json").write_text(content)
        with pytest.raises(InputError, match="cannot be read"):
            load_tokenizer(section("huggingface", folder))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}", "names no eos_token"),
        ('{"eos_token": null}', "names no eos_token"),
        ('{"eos_token": "</s>"}', "'</s>' of tokenizer_config.json is not in the vocabulary"),
        ("{", "is not JSON"),
        ("[]", "holds no JSON object"),
    ],
)
def test_without_an_end_of_document_token_a_folder_is_refused(content: str, message: str, tmp_path: Path) -> None:
    folder = huggingface_folder(tmp_path / "t")
    (folder / "tokenizer_config.json").write_text(content)
    with pytest.raises(InputError, match=message):
        load_tokenizer(section("huggingface", folder))


def test_sentencepiece_models_that_cannot_serve_are_refused(tmp_path: Path) -> None:
    (tmp_path / "m.model").write_bytes(train_sentencepiece(eos_id=-1, model_type="bpe"))
    with pytest.raises(InputError, match="no end-of-sentence piece"):
        load_tokenizer(section("sentencepiece", tmp_path / "m.model"))
    (tmp_path / "w.model").write_bytes(train_sentencepiece(model_type="word", byte_fallback=False, vocab_size=30))
    with pytest.raises(InputError, match="word or char"):
        load_tokenizer(section("sentencepiece", tmp_path / "w.model"))


def test_special_token_ids_are_those_of_the_saved_folder(tmp_path: Path) -> None:
    """An export reads them from the folder, a run from the tokenizer itself: all three agree."""
    (tmp_path / "all.model").write_bytes(train_sentencepiece(pad_id=3))
    (tmp_path / "eos.model").write_bytes(train_sentencepiece(bos_id=-1))
    bytes_, full, least = ByteTokenizer(), *(SentencePieceTokenizer(tmp_path / f"{n}.model") for n in ("all", "eos"))
    assert special_token_ids(bytes_) == {"bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 258}
    assert special_token_ids(full).keys() == special_token_ids(bytes_).keys()
    assert list(special_token_ids(least)) == ["eos_token_id"]
    for number, tokenizer in enumerate((bytes_, full, least)):
        folder = tmp_path / str(number)
        tokenizer.save_pretrained(folder)
        saved: Any = AutoTokenizer.from_pretrained(folder)
        ids = {name: getattr(saved, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        expected = {name: index for name, index in ids.items() if index is not None}
        assert special_token_ids(tokenizer) == special_token_ids(HuggingFaceTokenizer(folder)) == expected


def test_a_special_token_outside_the_vocabulary_has_no_id(tmp_path: Path) -> None:
    folder = huggingface_folder(tmp_path / "t", bos_token="<absent>")
    assert "bos_token_id" not in special_token_ids(HuggingFaceTokenizer(folder))
    folder = huggingface_folder(tmp_path / "u", pad_token=7)
    with pytest.raises(InputError, match=r"pad_token of tokenizer_config\.json is 7, not a text"):
        HuggingFaceTokenizer(folder)
