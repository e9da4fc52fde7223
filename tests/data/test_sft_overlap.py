"""Validation sources that hold what is trained on are refused, those that hold something else are not."""

from __future__ import annotations

from pathlib import Path

import datasets
import pytest

from orthros_train.config.sft import SFTSource
from orthros_train.data.sft_overlap import why_overlapping
from orthros_train.errors import InputError
from tests.data.chat_tokenizers import write_tokenizer
from tests.data.chats import sft_config, sft_data, write_chats


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """chats/a.jsonl, chats/val.jsonl, chats/sub/b.jsonl; chats-2/c.jsonl; a folder of links to chats."""
    for name in ("chats/a", "chats/val", "chats/sub/b", "chats-2/c"):
        file = tmp_path / f"{name}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        write_chats(file, 3, seed=len(name))
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "d.jsonl").symlink_to(tmp_path / "chats" / "val.jsonl")
    return tmp_path


PATHS = [
    ("chats", "chats/val.jsonl", True),
    ("chats", "chats/sub", True),
    ("chats", "chats/sub/b.jsonl", True),
    ("chats", "chats/sub/../val.jsonl", True),
    ("chats", "links", True),
    ("chats/val.jsonl", "links/d.jsonl", True),
    ("chats/a.jsonl", "chats/val.jsonl", False),
    ("chats/a.jsonl", "chats/sub", False),
    ("chats", "chats-2", False),
    ("chats/a.jsonl", "links", False),
]


@pytest.mark.parametrize(("one", "other", "overlaps"), PATHS)
def test_files_in_common(folder: Path, one: str, other: str, overlaps: bool) -> None:
    first, second = SFTSource(path=f"{folder}/{one}"), SFTSource(path=f"{folder}/{other}")
    for pair in ((first, second), (second, first)):
        assert why_overlapping(*pair) == ("give each file to one of them" if overlaps else None)


def test_a_file_of_a_folder_is_not_trained_and_validated_on(folder: Path) -> None:
    """Through the run's own door, both ways round."""
    tokenizer = write_tokenizer(folder / "tokenizer")
    for train, validation in (("chats", "chats/val.jsonl"), ("chats/val.jsonl", "chats")):
        own = [{"path": str(folder / validation)}]
        config = sft_config(folder / "run", tokenizer, [folder / train], sft__validation=own)
        with pytest.raises(InputError, match=r"data.sft.validation names .*chats.*, which data.sft.train trains on"):
            sft_data(config, "validation")


SPLITS = [
    ("train", "train", True),
    ("train", "test", False),
    ("train", "train[:5%]", True),
    ("train[:95%]", "train[95%:]", False),
    ("train[:90%]", "train[95%:]", False),
    ("train[:95%]", "train[90%:]", True),
    ("train[10%:]", "train[:10%]", False),
    ("train[:1000]", "train[1_000:2_000]", False),
    ("train[:1001]", "train[1000:]", True),
    ("train[:-100]", "train[-100:]", False),
    ("train[:-5%]", "train[-5%:]", False),
    ("train[:-5%]", "train[95%:]", True),  # rounded each in its own way
    ("train[:100]", "train[95%:]", True),  # of how many rows?
    ("train[:100]", "train[-100:]", True),
    ("train[:-200]", "train[-100:]", True),  # written otherwise, it is accepted: the remedy says how
    ("train[:50%]+test", "train[50%:]", False),
    ("train[:50%]+test", "train[50%:]+test[:10]", True),
    ("all", "test", True),
    ("train[:10%](pct1_dropremainder)", "train[10%:]", True),
    ("train", "train[:10%](pct1_dropremainder)", True),
    ("test", "train[:10%](pct1_dropremainder)", False),
]


@pytest.mark.parametrize(("one", "other", "overlaps"), SPLITS)
def test_splits_of_a_data_set(one: str, other: str, overlaps: bool) -> None:
    first, second = (SFTSource(dataset="someone/chats", split=split) for split in (one, other))
    for pair in ((first, second), (second, first)):
        assert bool(why_overlapping(*pair)) is overlaps
    assert why_overlapping(first, SFTSource(dataset="someone/else", split=other)) is None


@pytest.mark.parametrize("rows", [1, 9, 10, 37, 1000, 2050])
def test_what_is_accepted_has_no_row_in_common(rows: int) -> None:
    """As the library itself cuts the splits."""
    lengths = {"train": rows, "test": rows}
    for one, other in ((one, other) for one, other, overlaps in SPLITS if not overlaps and "(" not in other):
        held = [
            {
                (part.splitname, row)
                for part in datasets.ReadInstruction.from_spec(spec).to_absolute(lengths)
                for row in range(part.from_, part.to)
            }
            for spec in (one, other)
        ]
        assert not held[0] & held[1], (one, other)


def test_configurations() -> None:
    def remedy(one: str | None, other: str | None) -> str | None:
        sources = [SFTSource(dataset="someone/chats", configuration=name) for name in (one, other)]
        return why_overlapping(*sources)

    assert remedy("en", "de") is None
    assert "splits that are apart" in str(remedy("en", "en"))
    assert remedy("en", None) == remedy(None, "en") == "name the configuration of both"


def test_a_data_set_on_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files are those of a path inside it; its folder is the same however it is written."""
    monkeypatch.chdir(folder)
    whole = SFTSource(dataset="chats", split="train")
    assert why_overlapping(SFTSource(path="chats/val.jsonl"), whole) == "give each file to one of them"
    assert why_overlapping(whole, SFTSource(path="chats/sub")) == "give each file to one of them"
    assert why_overlapping(whole, SFTSource(path="chats-2")) is None
    assert why_overlapping(whole, SFTSource(dataset="chats-2")) is None
    assert why_overlapping(whole, SFTSource(dataset="chats/sub")) == "give each file to one of them"
    again = SFTSource(dataset=f"{folder}/chats/", split="train[:10%]")
    assert "splits that are apart" in str(why_overlapping(whole, again))
