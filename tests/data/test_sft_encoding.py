"""From token ids and mask to base tokens and labels: cut, dropped, counted and kept on disk."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orthros_train.config.sft import SFTSection, SFTSource
from orthros_train.data import sft_encoding
from orthros_train.data.chat_template import ChatTemplate, EncodedConversation
from orthros_train.data.sft_encoding import Counts, EncodedSource, fit
from orthros_train.errors import InputError
from tests.data.chat_tokenizers import chat_template, write_tokenizer
from tests.data.chats import write_chats

# BOS 1, a question 10 11, an answer 20 21 22, a question 30, an answer 40 41, white space 50.
IDS = [1, 10, 11, 20, 21, 22, 30, 40, 41, 50]
TRAINED = [0, 0, 0, 1, 1, 1, 0, 1, 1, 0]


def fitted(length: int, too_long: Any, ids: list[int] = IDS, trained: list[int] = TRAINED, bos: int | None = 1) -> Any:
    encoded = EncodedConversation(np.array(ids), np.array(trained, dtype=bool))
    conversation, fate = fit(encoded, length, too_long, bos)
    return fate if conversation is None else (fate, conversation.tokens.tolist(), conversation.labels.tolist())


NO = -100
WHOLE = ([1, 10, 11, 20, 21, 22, 30, 40], [NO, NO, 20, 21, 22, NO, 40, 41])


@pytest.mark.parametrize(
    ("length", "too_long", "expected"),
    [
        (8, "drop", ("kept", *WHOLE)),  # the last label and what follows it are no base tokens
        (7, "drop", "too_long"),
        (7, "cut_end", ("cut", WHOLE[0][:7], WHOLE[1][:7])),
        (6, "cut_end", ("cut", WHOLE[0][:5], WHOLE[1][:5])),  # position 5 would predict a question
        (2, "cut_end", "no_answer"),
        (7, "cut_start", ("cut", [1, 11, 20, 21, 22, 30, 40], [NO, 20, 21, 22, NO, 40, 41])),
        (5, "cut_start", ("cut", [1, 21, 22, 30, 40], [NO, 22, NO, 40, 41])),
        (3, "cut_start", ("cut", [1, 30, 40], [NO, 40, 41])),
        (1, "cut_start", "no_answer"),
    ],
)
def test_cutting_by_hand(length: int, too_long: str, expected: Any) -> None:
    assert fitted(length, too_long) == expected


def test_cutting_at_the_start_without_a_bos() -> None:
    expected = ("cut", WHOLE[0][4:], WHOLE[1][4:])
    assert fitted(4, "cut_start", bos=None) == fitted(4, "cut_start", bos=99) == expected


def test_nothing_to_train_on() -> None:
    assert fitted(20, "drop", trained=[0] * 10) == "no_answer"
    assert fitted(20, "drop", trained=[1] + [0] * 9) == "no_answer"  # nothing predicts the first token
    assert fitted(20, "drop", ids=[], trained=[]) == "no_answer"
    assert fitted(20, "drop", ids=[7], trained=[1]) == "no_answer"


def test_counts_in_words() -> None:
    counts = Counts(kept=1200, cut=3, too_long=2, no_answer=1, forged=4)
    assert counts.describe("cut_end", 512) == (
        "1,200 of 1,207 conversations; 3 cut at their end to 512 tokens; 2 dropped: longer than 512 tokens; "
        "1 dropped: without an answer to train on; 4 dropped: spelling out a special token"
    )
    assert Counts(kept=2).describe("drop", 512) == "2 of 2 conversations"


class TestEncodedSource:
    @pytest.fixture
    def template(self, tmp_path: Path) -> ChatTemplate:
        return chat_template(write_tokenizer(tmp_path / "tokenizer"))

    @staticmethod
    def encode(file: Path, template: ChatTemplate, length: int = 200, **section: Any) -> EncodedSource:
        return EncodedSource(SFTSource(path=str(file)), SFTSection(**section), template, length, None)

    def test_equals_each_row_encoded_alone(
        self, tmp_path: Path, template: ChatTemplate, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sft_encoding, "BLOCK_ROWS", 7)
        file = write_chats(tmp_path / "chats.jsonl", 30)
        encoded = self.encode(file, template, 100, too_long="cut_end")
        expected = []
        for line in file.read_text().splitlines():
            conversation = sft_encoding.conversation_of(json.loads(line), {}, "")
            expected.append(fit(template.encode(conversation, ""), 100, "cut_end", None))
        assert encoded.counts == Counts(kept=30, cut=sum(fate == "cut" for _, fate in expected))
        assert 0 < encoded.counts.cut < 30
        for index, (one, _) in enumerate(expected):
            assert one is not None
            assert encoded[index].tokens.tolist() == one.tokens.tolist()
            assert encoded[index].labels.tolist() == one.labels.tolist()
            assert encoded.lengths[index] == len(one.tokens)
            assert encoded.outputs[index] == (one.labels != -100).sum()

    def test_counts_what_it_drops(self, tmp_path: Path, template: ChatTemplate) -> None:
        rows = [
            {"prompt": "a", "response": "b"},
            {"prompt": "a" * 300, "response": "b"},
            {"prompt": "a", "response": "b<|im_end|>"},
            {"messages": [{"role": "user", "content": "a"}]},
        ]
        file = tmp_path / "chats.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        assert self.encode(file, template).counts == Counts(kept=1, too_long=1, no_answer=1, forged=1)
        file.write_text(json.dumps(rows[3]) + "\n")
        nothing = self.encode(file, template)
        assert (nothing.counts, len(nothing.lengths)) == (Counts(no_answer=1), 0)

    def test_a_second_run_reads_the_cache(
        self, tmp_path: Path, template: ChatTemplate, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        file = write_chats(tmp_path / "chats.jsonl", 10)
        first = self.encode(file, template)
        monkeypatch.setattr(ChatTemplate, "encode", None)
        again = self.encode(file, template)
        assert again.digest == first.digest
        assert again[9].tokens.tolist() == first[9].tokens.tolist()
        for changed in ({"length": 90}, {"too_long": "cut_end"}):
            with pytest.raises(TypeError):  # encoded anew
                self.encode(file, template, **changed)
        write_chats(file, 10, seed=1)
        with pytest.raises(TypeError):
            self.encode(file, template)

    def test_an_interrupted_encoding_goes_on(
        self, tmp_path: Path, template: ChatTemplate, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Blocks that were finished are not encoded again, and the result is that of one go."""
        monkeypatch.setattr(sft_encoding, "BLOCK_ROWS", 4)
        file = write_chats(tmp_path / "chats.jsonl", 10)
        original, calls = ChatTemplate.encode, 0

        def interrupted(*arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == 6:
                raise KeyboardInterrupt
            return original(*arguments)

        monkeypatch.setattr(ChatTemplate, "encode", interrupted)
        with pytest.raises(KeyboardInterrupt):
            self.encode(file, template)
        resumed = self.encode(file, template)
        assert calls == 6 + 6
        whole = EncodedSource(SFTSource(path=str(file)), SFTSection(), template, 200, tmp_path / "elsewhere")
        assert resumed.digest == whole.digest
        assert calls == 6 + 6 + 10

    @pytest.mark.parametrize("lost", [0, 1, 2])
    @pytest.mark.parametrize("damage", ["removed", "overwritten", "cut"])
    def test_a_lost_block_is_encoded_again(
        self, tmp_path: Path, template: ChatTemplate, monkeypatch: pytest.MonkeyPatch, lost: int, damage: str
    ) -> None:
        """The summary, which says how many blocks there are, is whole: no row may be missing all the same."""
        monkeypatch.setattr(sft_encoding, "BLOCK_ROWS", 4)
        file = write_chats(tmp_path / "chats.jsonl", 10)
        first = self.encode(file, template)
        expected, counts, digest = (
            [row.tokens.tolist() for row in map(first.__getitem__, range(10))],
            first.counts,
            first.digest,
        )
        del first
        (block,) = (tmp_path / "chats.jsonl.cache").glob(f"*-{lost:06d}")
        if damage == "removed":
            shutil.rmtree(block)
        else:
            content = (block / "tokens.npy").read_bytes()
            (block / "tokens.npy").write_bytes(content[:-8] + (b"" if damage == "cut" else b"\x07" * 8))
        original, calls = ChatTemplate.encode, 0

        def counted(*arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            return original(*arguments)

        monkeypatch.setattr(ChatTemplate, "encode", counted)
        again = self.encode(file, template)
        assert (again.counts, again.digest) == (counts, digest)
        assert [again[index].tokens.tolist() for index in range(10)] == expected
        assert calls == (4, 4, 2)[lost]  # the other blocks are not encoded again

    def test_a_row_that_is_no_conversation(self, tmp_path: Path, template: ChatTemplate) -> None:
        file = tmp_path / "chats.jsonl"
        file.write_text('{"prompt": "a", "response": "b"}\n{"text": "a"}\n')
        with pytest.raises(InputError, match=r"chats.jsonl, line 2: no column messages"):
            self.encode(file, template)
