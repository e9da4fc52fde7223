"""Generated long texts: length, what is hidden in them, and how an answer is judged."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from evaluation.suites.needles import NEW_TOKENS, TASKS, needle_cards, needle_document, share_found
from evaluation.suites.task_card import ROW_HASH, TaskSetting
from orthros_train.data.tokenizers import ByteTokenizer
from orthros_train.errors import InputError
from tests.evaluation.tiny_models import save_merging_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> AutoTokenizer:
    folder = tmp_path_factory.mktemp("bytes")
    ByteTokenizer().save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("kind", TASKS)
def test_a_document_fills_its_length_and_holds_what_is_asked(kind: str, tokenizer: AutoTokenizer) -> None:
    document = needle_document(TASKS[kind], 1500, tokenizer, random.Random(0))
    text, _, question = document["input"].rpartition("\nQuestion:")
    assert 1500 - 75 < len(document["input"]) <= 1500  # one sentence is at most 70 bytes
    assert len(document["outputs"]) == TASKS[kind].values * TASKS[kind].keys
    for value in document["outputs"]:
        assert text.count(value) == 1
        assert value not in question
    assert text.count("The code of") == (TASKS[kind].keys + TASKS[kind].distractors) * TASKS[kind].values
    assert not document["input"][-1].isspace()


def test_the_same_seed_makes_the_same_document(tokenizer: AutoTokenizer) -> None:
    first, again, other = (
        needle_document(TASKS["multikey"], 900, tokenizer, random.Random(seed)) for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


def test_too_short_a_text_is_refused(tokenizer: AutoTokenizer) -> None:
    with pytest.raises(InputError, match="no room for the facts"):
        needle_document(TASKS["single"], 50, tokenizer, random.Random(0))


def test_the_score_is_the_share_of_the_expected_values() -> None:
    assert share_found(" 1234567 and 7654321.", ["1234567", "7654321", "1111111", "2222222"]) == 0.5


@pytest.mark.parametrize("kind", TASKS)
def test_prompt_and_answer_fill_the_length_together(kind: str, tokenizer: AutoTokenizer) -> None:
    (card,) = [card for card in needle_cards([1500]) if kind == card.name.split("_")[1]]
    setting = TaskSetting(None, tokenizer, documents=3)  # type: ignore[arg-type]
    for document in card.build(setting).eval_docs:
        assert 1500 - 75 < len(document["input"]) + NEW_TOKENS <= 1500
    assert card.tokens == 1500


def test_every_tokenizer_gets_the_same_facts(tokenizer: AutoTokenizer, tmp_path: Path) -> None:
    """So that runs of two models are compared document by document, though texts differ in length."""
    merging = AutoTokenizer.from_pretrained(save_merging_tokenizer(tmp_path, adds_bos=False))
    (card,) = [card for card in needle_cards([1500]) if "multikey" in card.name]
    rows = [
        list(card.build(TaskSetting(None, each, documents=2)).eval_docs)  # type: ignore[arg-type]
        for each in (tokenizer, merging)
    ]
    for ours, theirs in zip(*rows, strict=True):
        assert ours["input"] != theirs["input"]
        assert (ours["outputs"], ours[ROW_HASH]) == (theirs["outputs"], theirs[ROW_HASH])
    assert len({row[ROW_HASH] for row in rows[0]}) == 2


def test_every_task_at_every_length() -> None:
    assert [card.name for card in needle_cards([512, 4096])] == [
        f"long_{kind}_{length}" for length in (512, 4096) for kind in ("single", "multikey", "multivalue", "multiquery")
    ]
