"""Text to token ids and back: bytes, SentencePiece models and Hugging Face folders behind one interface.

* Raw text is encoded with special-token parsing off: a document that spells out "<eos>" gets the ids of its
  characters, never the id that ends a document. No BOS or EOD is added here.
* `fingerprint` identifies the definition; a corpus records it and a run refuses another one.
* A tokenizer is loaded without importing transformers, so a worker process is ready in a fraction of a second;
  `save_pretrained` writes a folder that AutoTokenizer loads.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import sentencepiece
import tokenizers as hf
from tokenizers import decoders, models, pre_tokenizers

from orthros_train.config import TokenizerSection
from orthros_train.data.sentencepiece_conversion import convert_sentencepiece, parse_sentencepiece
from orthros_train.errors import InputError

TokenizerType = Literal["byte", "sentencepiece", "huggingface"]

BYTE_BOS, BYTE_EOS, BYTE_PAD = "<bos>", "<eos>", "<pad>"


class Tokenizer(Protocol):
    """What the project asks of a tokenizer."""

    type: TokenizerType
    vocab_size: int  # every id is below it
    eod_id: int  # ends a document
    bos_id: int | None  # begins a text
    pad_id: int | None  # fills up a row
    fingerprint: str  # SHA-256 of the definition, hex

    def encode(self, text: str) -> list[int]:
        """Ids of raw text; special tokens spelled out in it are ordinary characters, and none is added."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, special tokens spelled out where the tokenizer can."""
        ...

    def save_pretrained(self, folder: str | Path) -> None:
        """Write a Hugging Face tokenizer folder with the same ids."""
        ...


def load_tokenizer(section: TokenizerSection) -> Tokenizer:
    """Load the tokenizer that a config's `tokenizer` section names.

    Raises:
        InputError: the file is missing, cannot be read, or has no end-of-document token.
    """
    if section.type == "byte":
        return ByteTokenizer()
    path = Path(str(section.path))  # the section refuses None for these types
    return SentencePieceTokenizer(path) if section.type == "sentencepiece" else HuggingFaceTokenizer(path)


class ByteTokenizer:
    """The 256 bytes of UTF-8 as ids 0 … 255, then <bos>, <eos> (the EOD) and <pad>: 259 ids."""

    type: TokenizerType = "byte"
    vocab_size = 259
    eod_id = 257
    bos_id: int | None = 256
    pad_id: int | None = 258
    fingerprint = hashlib.sha256(b"bytes 0-255, <bos> 256, <eos> 257, <pad> 258").hexdigest()

    def __init__(self) -> None:
        self._backend = _byte_backend()

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, ids: Sequence[int]) -> str:
        return self._backend.decode(list(ids), skip_special_tokens=False)

    def save_pretrained(self, folder: str | Path) -> None:
        save_fast_tokenizer(self._backend, folder, bos_token=BYTE_BOS, eos_token=BYTE_EOS, pad_token=BYTE_PAD)


class SentencePieceTokenizer:
    """A trained SentencePiece model; its </s> (eos_id) is the EOD.

    Args:
        path: the .model file.
    """

    type: TokenizerType = "sentencepiece"

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise InputError(f"tokenizer {path} is missing; train one with tools/train_tokenizer.py")
        self._model = path.read_bytes()
        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(self._model)
        except RuntimeError as error:
            raise InputError(f"tokenizer {path} is no SentencePiece model ({error}); name a .model file") from error
        parse_sentencepiece(self._model)  # refused now rather than when the trained model is exported
        self.vocab_size: int = self._processor.get_piece_size()
        self.eod_id: int = self._processor.eos_id()
        self.bos_id = _if_any(self._processor.bos_id())
        self.pad_id = _if_any(self._processor.pad_id())
        if self.eod_id < 0:
            raise InputError(
                f"tokenizer {path} has no end-of-sentence piece, which ends documents; train it with eos_id set"
            )
        self.fingerprint = hashlib.sha256(self._model).hexdigest()

    def encode(self, text: str) -> list[int]:
        return self._processor.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self._processor.decode(list(ids))

    def save_pretrained(self, folder: str | Path) -> None:
        backend, special_tokens = convert_sentencepiece(self._model)
        save_fast_tokenizer(backend, folder, **special_tokens)


class HuggingFaceTokenizer:
    """A folder with tokenizer.json (or that file); the EOS that its tokenizer_config.json names is the EOD.

    Args:
        path: the folder, or tokenizer.json itself.
    """

    type: TokenizerType = "huggingface"

    def __init__(self, path: Path) -> None:
        folder = path.parent if path.name == "tokenizer.json" else path
        file = folder / "tokenizer.json"
        if not file.is_file():
            hint = "name a folder that holds tokenizer.json"
            if models := sorted(folder.glob("*.model")):
                hint = f"for its SentencePiece model set tokenizer.type: sentencepiece and tokenizer.path: {models[0]}"
            raise InputError(f"tokenizer {file} is missing; {hint}")
        try:
            definition = json.loads(file.read_bytes())
            self._backend = hf.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain Exception
            raise InputError(f"tokenizer {file} cannot be read ({error}); save it again or name another") from error
        self._folder = folder
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = True
        self.vocab_size = max(self._backend.get_vocab(with_added_tokens=True).values()) + 1
        self.eod_id = _eos_id(folder, self._backend)
        self.bos_id, self.pad_id = (_optional_id(folder, self._backend, name) for name in ("bos_token", "pad_token"))
        for key in ("truncation", "padding"):  # overridden above, so no part of what ids text gets
            definition.pop(key, None)
        canonical = json.dumps([definition, self.eod_id], sort_keys=True, ensure_ascii=True)
        self.fingerprint = hashlib.sha256(canonical.encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        return self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._backend.decode(list(ids), skip_special_tokens=False)

    def save_pretrained(self, folder: str | Path) -> None:
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        for name in _TOKENIZER_FILES:
            if (self._folder / name).is_file():
                shutil.copyfile(self._folder / name, target / name)


_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)


def special_token_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """The ids that begin, end and pad a text, as far as there are such, under the names of a model's config.json."""
    ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eod_id, "pad_token_id": tokenizer.pad_id}
    return {name: value for name, value in ids.items() if value is not None}


def _eos_id(folder: Path, backend: hf.Tokenizer) -> int:
    """Id of the EOS token that the folder's own files name."""
    token, file = _named_token(folder, "eos_token")
    if token is None:
        raise InputError(
            f"tokenizer {folder} names no eos_token, which ends documents; add one to its tokenizer_config.json"
        )
    index = backend.token_to_id(token)
    if index is None:
        raise InputError(f"tokenizer {folder}: eos_token {token!r} of {file} is not in the vocabulary; correct it")
    return index


def _optional_id(folder: Path, backend: hf.Tokenizer, name: str) -> int | None:
    """Id of another special token; None where the folder names none, or one that is not in the vocabulary."""
    token, _ = _named_token(folder, name)
    return None if token is None else backend.token_to_id(token)


def _named_token(folder: Path, name: str) -> tuple[str | None, str]:
    """The special token of that name, and the file that says so; None where none does."""
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        token = _read_json(folder / file).get(name)
        if isinstance(token, dict):  # an AddedToken
            token = token.get("content")
        if token is not None and not isinstance(token, str):
            raise InputError(f"tokenizer {folder}: {name} of {file} is {token!r}, not a text; correct it")
        if token is not None:
            return token, file
    return None, ""


def _if_any(index: int) -> int | None:
    """SentencePiece's -1 means that there is no such piece."""
    return None if index < 0 else index


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object, {} where the file is missing."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise InputError(f"tokenizer file {path} is not JSON ({error}); correct it") from error
    if not isinstance(content, dict):
        raise InputError(f"tokenizer file {path} holds no JSON object; correct it")
    return content


def _byte_backend() -> hf.Tokenizer:
    """A `tokenizers` object whose id of a byte is the byte."""
    printable = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or b >= 174]  # stand for themselves
    shifted = iter(range(256, 512))
    characters = [chr(b) if b in printable else chr(next(shifted)) for b in range(256)]
    if set(characters) != set(pre_tokenizers.ByteLevel.alphabet()):
        raise RuntimeError("the byte alphabet of the tokenizers library has changed")
    backend = hf.Tokenizer(models.BPE(vocab={character: b for b, character in enumerate(characters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([BYTE_BOS, BYTE_EOS, BYTE_PAD])
    return backend


def save_fast_tokenizer(backend: hf.Tokenizer, folder: str | Path, **special_tokens: str) -> None:
    """Save a `tokenizers` object as a folder for AutoTokenizer."""
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415 (takes a second)

    PreTrainedTokenizerFast(
        tokenizer_object=backend, clean_up_tokenization_spaces=False, **special_tokens
    ).save_pretrained(str(folder))
