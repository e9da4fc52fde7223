"""Rows of conversations: whole, apart from each other, in an order that depends on data and seed alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from orthros_train.data import collate, load_tokenizer
from orthros_train.data.sft import SFTData
from orthros_train.data.sft_encoding import EncodedSource
from orthros_train.errors import InputError
from tests.data.chat_tokenizers import spell, write_tokenizer
from tests.data.chats import sft_config, sft_data, write_chats


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    return write_tokenizer(tmp_path / "tokenizer")


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    return write_chats(tmp_path / "chats.jsonl", 60)


def conversations(data: SFTData, index: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(tokens, labels) of each segment of a sample but the padding."""
    sample = data.sample(index)
    assert sample.document_ids is not None
    found = []
    for document in np.unique(sample.document_ids):
        part = sample.document_ids == document
        if (sample.shift_labels[part] != -100).any():
            found.append((tuple(sample.input_ids[part].tolist()), tuple(sample.shift_labels[part].tolist())))
    return found


@pytest.mark.parametrize("packing", [True, False])
def test_an_epoch_holds_every_conversation_once(tmp_path: Path, tokenizer: Path, chats: Path, packing: bool) -> None:
    config = sft_config(tmp_path, tokenizer, [chats], sft__packing=packing, train__sequence_length=200)
    data = sft_data(config)
    (rows,) = data.epoch_sizes
    source: EncodedSource = data._sources[0]
    assert source.counts.kept == 60
    held_out = sft_data(config, "validation")
    everything = [[source[i].tokens.tolist() for i in range(60)]]
    for epoch in range(2):
        seen = [one for index in range(epoch * rows, (epoch + 1) * rows) for one in conversations(data, index)]
        assert len(seen) == 54
        assert len(set(seen)) == len(seen)
        rest = [one for index in range(held_out.epoch_sizes[0]) for one in conversations(held_out, index)]
        assert sorted(list(tokens) for tokens, _ in seen + rest) == sorted(everything[0])
    assert (rows < 54) if packing else (rows == 54)


def test_a_row_written_out(tmp_path: Path, tokenizer: Path) -> None:
    """Two conversations and padding: tokens, segments, labels and output positions."""
    file = tmp_path / "two.jsonl"
    file.write_text('{"prompt": "abc", "response": "de"}\n{"prompt": "f", "response": "g"}\n')
    config = sft_config(tmp_path, tokenizer, [file], data__split=[1.0, 0.0, 0.0], train__sequence_length=64)
    sample = sft_data(config).sample(0)
    first = "<|im_start|>user\nabc<|im_end|>\n<|im_start|>assistant\nde"
    second = "<|im_start|>user\nf<|im_end|>\n<|im_start|>assistant\ng"
    one, two = len("?user\nabc?\n?assistant\nde"), len("?user\nf?\n?assistant\ng")
    assert spell(tokenizer, sample.input_ids[: one + two].tolist()) == first + second
    assert set(sample.input_ids[one + two :].tolist()) == {259}  # the tokenizer's EOS
    assert sample.document_ids is not None
    assert sample.document_ids.tolist() == [0] * one + [1] * two + [2] * (64 - one - two)
    batch = collate([sample], output_slots=8)
    end = 259
    d, e, g = (spell_id(tokenizer, letter) for letter in "deg")
    assert batch["output_positions"].tolist() == [[one - 3, one - 2, one - 1, one + two - 2, one + two - 1, -1, -1, -1]]
    assert batch["shift_labels"].tolist() == [[d, e, end, g, end, -100, -100, -100]]
    full = collate([sample])
    assert "output_positions" not in full
    assert full["shift_labels"].shape == (1, 64)
    assert (full["shift_labels"] != -100).sum() == 5


def spell_id(tokenizer: Path, letter: str) -> int:
    return next(id_ for id_ in range(256) if spell(tokenizer, [id_]) == letter)


def test_the_number_of_outputs_is_known_beforehand(tmp_path: Path, tokenizer: Path, chats: Path) -> None:
    data = sft_data(sft_config(tmp_path, tokenizer, [chats]))
    for index in range(2 * data.epoch_sizes[0]):
        assert data.output_count(index) == (data.sample(index).shift_labels != -100).sum() > 0


def test_the_order_depends_on_data_and_seed_alone(tmp_path: Path, tokenizer: Path, chats: Path) -> None:
    def ids(**options: object) -> tuple[str, list[list[int]]]:
        data = sft_data(sft_config(tmp_path, tokenizer, [chats], **options))
        return data.fingerprint, [data.sample(index).input_ids.tolist() for index in (0, 5, 100, 3)]

    reference = ids()
    assert ids(train__steps=600, train__micro_batch_size=1, train__global_batch_size=64) == reference
    assert ids(train__seed=7)[0] != reference[0]
    assert ids(train__seed=7)[1] != reference[1]


def test_sources_are_blended_by_weight(tmp_path: Path, tokenizer: Path, chats: Path) -> None:
    more = write_chats(tmp_path / "more.jsonl", 20, seed=3)
    sources = [{"path": str(chats), "weight": 3.0}, {"path": str(more)}]
    data = sft_data(sft_config(tmp_path, tokenizer, sources))
    assert [data.sample_id(index)[0] for index in range(40)].count(1) == 10


def test_held_out_conversations_do_not_depend_on_the_seed(tmp_path: Path, tokenizer: Path, chats: Path) -> None:
    found = []
    for seed in (1, 2):
        data = sft_data(sft_config(tmp_path, tokenizer, [chats], train__seed=seed), "validation")
        found.append(sorted(one for index in range(data.epoch_sizes[0]) for one in conversations(data, index)))
    assert found[0] == found[1]


def test_validation_sources_of_their_own(tmp_path: Path, tokenizer: Path, chats: Path) -> None:
    more = write_chats(tmp_path / "more.jsonl", 20, seed=3)
    own = {"sft__validation": [{"path": str(more)}], "train__sequence_length": 200}
    config = sft_config(tmp_path, tokenizer, [chats], **own)
    assert sft_data(config)._packings[0].members.shape == (60,)
    assert sft_data(config, "validation")._packings[0].members.shape == (20,)
    again = sft_config(tmp_path, tokenizer, [chats], sft__validation=[{"path": str(tmp_path / "." / "chats.jsonl")}])
    with pytest.raises(InputError, match=r"data.sft.validation names .*, which data.sft.train trains on"):
        sft_data(again, "validation")
    with pytest.raises(InputError, match=r"data.sft.validation is empty"):
        sft_data(sft_config(tmp_path, tokenizer, [chats], sft__validation=[]), "validation")


def test_what_was_read_is_said(tmp_path: Path, tokenizer: Path, chats: Path) -> None:
    data = sft_data(sft_config(tmp_path, tokenizer, [chats], train__sequence_length=100))
    (note,) = data.notes
    kept, dropped = data._sources[0].counts.kept, data._sources[0].counts.too_long
    assert dropped > 0
    assert note.startswith(f"{chats}: {kept} of 60 conversations; {dropped} dropped: longer than 100 tokens; train: ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train__sequence_length": 4}, r"the train split of .*chats.jsonl has no conversation \(0 of 60 conv"),
        ({"sft__train": []}, r"data.sft.train names no source; add one"),
        ({"sft__chat_template": "/nowhere"}, "data.sft.chat_template /nowhere cannot be read"),
    ],
)
def test_unfit_data(tmp_path: Path, tokenizer: Path, chats: Path, options: dict[str, object], message: str) -> None:
    config = sft_config(tmp_path, tokenizer, [chats], **options)
    with pytest.raises(InputError, match=message):
        SFTData(config, load_tokenizer(config.tokenizer), "train")
