"""The recall suite's prompts, cut and metric against examples worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from evaluation.suites.recall import (
    DROP,
    FDA,
    NQ,
    SQUAD,
    SWDE,
    TRIVIAQA,
    RecallTask,
    contains,
    cut_document,
    recall_cards,
)
from evaluation.suites.task_card import TaskSetting
from orthros_train.errors import InputError
from tests.evaluation.test_data_sources import Rows
from tests.evaluation.tiny_models import save_merging_tokenizer


class Words:
    """One token a word, single spaces between."""

    def __init__(self) -> None:
        self.words: list[str] = []

    def encode(self, text: str) -> list[int]:
        start = len(self.words)
        self.words += text.split()
        return list(range(start, len(self.words)))

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        assert skip_special_tokens
        return " ".join(self.words[index] for index in token_ids if index != BOS)


class WordsAfterBos(Words):
    """The same after BOS."""

    def encode(self, text: str) -> list[int]:
        return [BOS, *super().encode(text)]


BOS = -1


def numbered(count: int) -> list[str]:
    return [f"w{index}" for index in range(count)]


@pytest.mark.parametrize(
    ("task", "document", "prompt"),
    [
        (
            SWDE,
            {"text": "A film. Director: Jane Roe\n", "key": "director", "value": "Jane Roe"},
            "A film. Director: Jane Roe. Director:",
        ),
        (
            SWDE,
            {"text": "A film.\n\nSummary of information above... Year:", "key": "year", "value": "1999"},
            "A film. Year:",
        ),
        (SWDE, {"text": "A film. year:", "key": "year", "value": "1999"}, "A film. Year:"),
        (
            FDA,
            {"text": "\n510(k) k123.\n", "key": "type of test", "value": "assay"},
            "510(k) k123. Type of test:",
        ),
        (
            FDA,
            {"text": "A device. type of test:", "key": "type of test", "value": "assay"},
            "A device. . Type of test:",
        ),
        (
            SQUAD,
            {"text": "Rome fell in 476. Rome fell in the year ", "value": "476"},
            "Rome fell in 476. Rome fell in the year",
        ),
        (
            TRIVIAQA,
            {
                "context": "[DOC] [TLE] Oslo [PAR] Oslo is in Norway.",
                "question": "Where is Oslo? ",
                "answers": ["Norway"],
            },
            "Oslo  Oslo is in Norway. Where is Oslo?",
        ),
        (
            DROP,
            {"context": "He ran 3 yards. How far?", "question": "How far?", "answers": ["3"]},
            "He ran 3 yards. How far?",
        ),
        (
            NQ,
            {"context": "Paris is big. ", "question": "What is big?", "answers": ["Paris"]},
            "Paris is big. What is big?",
        ),
        (
            NQ,
            {"context": "Paris. what is big? What is big?", "question": "What is big?", "answers": ["Paris"]},
            "Paris. what is big?. What is big?",  # once, and as it is spelled
        ),
        (
            NQ,
            {"context": "Paris.What is big?What is big?", "question": "What is big?", "answers": ["Paris"]},
            "Paris.What is big?. What is big?",
        ),
        (
            DROP,
            {"context": "He ran.how far?How far?", "question": "How far?", "answers": ["3"]},
            "He ran. How far?",  # every time, letter case aside
        ),
        (
            TRIVIAQA,
            {"context": "Oslo. Where? [PAR]", "question": "Where?", "answers": ["Norway"]},
            "Oslo. Where?. Where?",  # what a marker stood behind is not the end
        ),
    ],
)
def test_prompts(task: RecallTask, document: dict[str, Any], prompt: str) -> None:
    assert task.prompt(document) == prompt
    assert not task.prompt(document)[-1].isspace()


@pytest.mark.parametrize(
    ("prediction", "answers", "score"),
    [
        ("It is Jane Roe.", ["jane roe"], 1),
        ("It is Jane.", ["jane roe"], 0),
        ("the second", ["first", "Second"], 1),
        ("costs $5.00 (net)", ["$5.00 (net)"], 1),
        ("costs $5x00 (net)", ["$5.00 (net)"], 0),  # the point is a point, not any character
        ("a+b", ["a+b"], 1),
        ("aab", ["a+b"], 0),
        ("anything", [""], 0),
        ("anything", [], 0),
        ("", ["x"], 0),
    ],
)
def test_contains(prediction: str, answers: list[str], score: int) -> None:
    assert contains(prediction, answers) == score


def test_the_cut_is_centered_on_the_answer() -> None:
    """length 70: 20 tokens stay, 10 of them before the answer."""
    words = numbered(100)
    words[60] = "Answer"
    assert cut_document(" ".join(words), ["answer"], Words(), 70).split() == words[50:70]


@pytest.mark.parametrize(("place", "kept"), [(0, (0, 20)), (4, (0, 20)), (10, (0, 20)), (11, (1, 21)), (99, (89, 100))])
def test_the_cut_at_the_documents_edges(place: int, kept: tuple[int, int]) -> None:
    words = numbered(100)
    words[place] = "Answer"
    found = cut_document(" ".join(words), ["Answer"], Words(), 70).split()
    assert found == words[slice(*kept)]
    assert "Answer" in found


@pytest.mark.parametrize(
    ("place", "kept"), [(0, (0, 19)), (4, (0, 19)), (9, (0, 19)), (10, (0, 20)), (60, (50, 70)), (99, (89, 100))]
)
def test_bos_is_one_of_the_tokens_that_stay(place: int, kept: tuple[int, int]) -> None:
    """Token 0 is BOS and word i token i + 1: of the 20 tokens that stay it is one where the cut is the head."""
    words = numbered(100)
    words[place] = "Answer"
    assert cut_document(" ".join(words), ["Answer"], WordsAfterBos(), 70).split() == words[slice(*kept)]


def test_bos_counts_at_the_head_at_the_end_and_before_a_token_position() -> None:
    words = numbered(100)
    text = " ".join(words)
    assert cut_document(text, None, WordsAfterBos(), 70).split() == words[:19]
    assert cut_document(text, ["absent"], WordsAfterBos(), 70).split() == words[90:]
    assert cut_document(text, ["absent"], WordsAfterBos(), 70, fallback=60).split() == words[49:69]
    short = " ".join(words[:19])  # 20 tokens, which are not more than stay: the position does not count
    assert cut_document(short, ["absent"], WordsAfterBos(), 70, fallback=11).split() == words[9:19]
    assert cut_document(f"{short} more", ["absent"], WordsAfterBos(), 70, fallback=11).split() == [*words[:19], "more"]


@pytest.mark.parametrize("adds_bos", [False, True])
def test_a_cut_by_a_real_tokenizer_is_a_part_of_the_text(adds_bos: bool, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(save_merging_tokenizer(tmp_path, adds_bos))
    text = "the cat sat on the mat and the dog " * 30
    assert len(tokenizer.encode(text)) > 100
    head = cut_document(text, None, tokenizer, 70)
    assert text.startswith(head)
    assert len(tokenizer.encode(head)) == 20


def test_an_answer_longer_than_the_second_half_is_cut_off_at_its_end() -> None:
    words = numbered(100)
    answer = " ".join(words[50:65])
    assert cut_document(" ".join(words), [answer], Words(), 70).split() == words[40:60]


def test_the_first_of_several_anchors_counts() -> None:
    words = numbered(100)
    words[30], words[70] = "Key", "Value"
    assert cut_document(" ".join(words), ["value", "key"], Words(), 70).split() == words[20:40]


def test_without_its_anchor_a_document_keeps_its_end_and_without_anchors_its_head() -> None:
    words = numbered(100)
    assert cut_document(" ".join(words), ["absent"], Words(), 70).split() == words[90:]
    assert cut_document(" ".join(words), None, Words(), 70).split() == words[:20]


def test_of_alternatives_the_first_in_the_list_that_stands_in_the_text_counts() -> None:
    """As published: not the one that stands first in the text."""
    words = numbered(200)
    words[40], words[120] = "Ann", "Bob"
    row = {"context": " ".join(words), "question": "?", "answers": ["none"], "alt_answers": ["absent", "bob", "ann"]}
    cut = NQ.cut(row, Words(), 70)
    assert cut["context"].split() == words[110:130]
    row["answers"] = ["ann"]  # an answer that stands in the text comes before every alternative
    cut = NQ.cut(row, Words(), 70)
    assert cut["context"].split() == words[30:50]


@pytest.mark.parametrize(("count", "kept"), [(200, slice(50, 70)), (15, slice(5, 15))])
def test_a_token_position_stands_in_for_an_answer_that_is_not_in_a_long_text(count: int, kept: slice) -> None:
    words = numbered(count)
    row = {"context": " ".join(words), "question": "?", "answers": ["none"], "alt_answers": ["no"], "tok_pos": 60}
    cut = NQ.cut(row, Words(), 70)
    assert cut["context"].split() == words[kept]


def test_a_token_position_counts_for_nothing_beside_an_answer_in_the_text() -> None:
    words = numbered(200)
    words[120] = "Acme"
    row = {"context": " ".join(words), "question": "?", "answers": ["acme"], "alt_answers": [], "tok_pos": 60}
    cut = NQ.cut(row, Words(), 70)
    assert cut["context"].split() == words[110:130]


@pytest.mark.parametrize(
    ("limit", "kept", "values"), [(1, 1, ["476"]), (2, 2, ["476", "Rome"]), (None, 2, ["476", "Rome"])]
)
def test_a_limit_counts_the_documents_that_can_be_cut(limit: int | None, kept: int, values: list[str]) -> None:
    rows = [{"text": f"In 5 or 476 fell Rome. {value}", "value": value} for value in ("5", "476", "I", "Rome")]
    card = recall_cards(512)[2]
    setting = TaskSetting(Rows(rows), tokenizer=Words(), limit=limit)  # type: ignore[arg-type]
    task = card.build(setting)
    assert [document["value"] for document in task.eval_docs] == values[:kept]
    assert card.count is not None
    assert card.count(setting) == 2


def test_a_data_set_without_a_document_that_can_be_cut_is_refused() -> None:
    setting = TaskSetting(Rows([{"text": "In 5.", "value": "5"}]), tokenizer=Words())  # type: ignore[arg-type]
    with pytest.raises(
        InputError, match="recall_squad_512: none of the 1 rows of squad has an answer of two characters"
    ):
        recall_cards(512)[2].build(setting)


def test_a_short_document_stays_whole_and_regex_characters_are_found() -> None:
    assert cut_document(" a (b) c ", ["(B)"], Words(), 70) == "a (b) c"


def test_documents_are_cut_by_their_own_fields() -> None:
    words = numbered(200)
    words[20], words[120] = "Maker", "Acme"
    text = " ".join(words)
    cut = FDA.cut({"text": text, "key": "maker", "value": "Acme"}, Words(), 70)
    assert cut["text"].split() == words[10:30]  # the key stands before the value
    cut = SQUAD.cut({"text": text, "value": "Acme"}, Words(), 70)
    assert cut["text"].split() == words[110:130]
    cut = NQ.cut({"context": text, "question": "?", "answers": ["absent"], "alt_answers": ["Acme"]}, Words(), 70)
    assert cut["context"].split() == words[110:130]
    cut = DROP.cut({"context": text, "question": "?", "answers": ["Acme"]}, Words(), 70)
    assert cut["context"].split() == words[:20]


def test_answers_of_one_character_are_left_out_where_the_cut_needs_them() -> None:
    assert not SQUAD.can_be_cut({"text": "in 5", "value": "5"})
    assert not NQ.can_be_cut({"context": "in 5", "question": "?", "answers": []})
    assert DROP.can_be_cut({"context": "in 5", "question": "?", "answers": ["5"]})


def test_six_tasks_at_each_length() -> None:
    names = [card.name for card in recall_cards(1024)]
    assert names == [f"recall_{task}_1024" for task in ("swde", "fda", "squad", "triviaqa", "drop", "nq")]
    assert [card.data["name"] for card in recall_cards(512)][-1] == "nq_512"
