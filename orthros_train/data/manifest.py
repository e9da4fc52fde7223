"""PREFIX.manifest.json: what a preprocessed corpus is. It is written last, so a corpus without it is incomplete."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from orthros_train.data.storage import write_text_atomically
from orthros_train.errors import InputError

FORMAT_VERSION = 1


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TokenizerRecord(_Record):
    """The tokenizer that made the ids."""

    type: Literal["byte", "sentencepiece", "huggingface"]
    fingerprint: str
    vocab_size: int
    eod_id: int


class FileRecord(_Record):
    """A file of the corpus."""

    name: str
    size_bytes: int
    sha256: str


class SourceRecord(BaseModel):
    """What the corpus was made of, for people: nothing reads it, so what another version wrote here is no error."""

    model_config = ConfigDict(frozen=True)

    name: str
    size_bytes: int


class Manifest(_Record):
    """Contents of the corpus. Nothing in it depends on when or with how many workers it was made."""

    format_version: int = FORMAT_VERSION
    tokenizer: TokenizerRecord
    dtype: str
    documents: int
    tokens: int  # EODs included
    max_token_id: int
    blank_documents_dropped: int
    text_bytes: int  # UTF-8, EODs excluded
    bin: FileRecord
    idx: FileRecord
    sources: list[SourceRecord]


def bin_path(prefix: Path) -> Path:
    """PREFIX.bin: the token ids."""
    return prefix.with_name(prefix.name + ".bin")


def idx_path(prefix: Path) -> Path:
    """PREFIX.idx: lengths and offsets of the documents."""
    return prefix.with_name(prefix.name + ".idx")


def manifest_path(prefix: Path) -> Path:
    """PREFIX.manifest.json."""
    return prefix.with_name(prefix.name + ".manifest.json")


def write_manifest(manifest: Manifest, prefix: Path) -> None:
    """Write PREFIX.manifest.json atomically."""
    write_text_atomically(manifest_path(prefix), manifest.model_dump_json(indent=2) + "\n")


def read_manifest(prefix: Path) -> Manifest:
    """Read PREFIX.manifest.json.

    Raises:
        InputError: it is missing (no corpus, or preprocessing did not finish), damaged, or of another version.
    """
    path = manifest_path(prefix)
    if not path.is_file():
        if bin_path(prefix).exists():
            raise InputError(
                f"corpus {prefix} has no {path.name}, so it is not complete; make it again with "
                "tools/preprocess_data.py --overwrite"
            )
        raise InputError(f"there is no corpus {prefix} ({path} is missing); make it with tools/preprocess_data.py")
    try:
        manifest = Manifest.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise InputError(f"{path} is damaged ({where}: {first['msg']}); make the corpus again") from error
    if manifest.format_version != FORMAT_VERSION:
        raise InputError(
            f"{path} has format version {manifest.format_version}, this code reads {FORMAT_VERSION}; "
            "make the corpus again"
        )
    return manifest
