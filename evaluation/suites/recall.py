"""The recall suite: find in a document what a question asks for, and say it.

Prompts, cut, stop and metric follow the published evaluation (Arora et al. 2024, "Just read twice", github.com/
HazyResearch/prefix-linear-attention at 7490f22): zero-shot, greedy, at most 48 tokens, up to the first newline; a
document scores 1 if the text contains one of its answers, letter case aside.

The cut keeps `length` - 50 tokens of the document, of which BOS is one where the tokenizer adds it: centered on the
answer (SWDE, FDA, SQuAD, NQ), or the document's head (TriviaQA, DROP). Where NQ's first answer is not in the document,
the first of its alternatives that is counts, then the position that the data set gives, if it gives one. Tokens are
those of the evaluated model, as published. Documents whose answer has fewer than two characters are left out where
the cut depends on the answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from evaluation.fingerprints import json_fingerprint
from evaluation.suites import data_sets
from evaluation.suites.data_sets import DataSet
from evaluation.suites.task_card import ROW_HASH, TaskCard, TaskSetting, make_task
from orthros_train.errors import InputError

if TYPE_CHECKING:
    from lm_eval.api.task import ConfigurableTask

LENGTHS = (512, 1024, 2048)
NQ_LENGTH = 2000  # NQ's documents come in three sizes; all are cut to this many tokens
ANSWER_TOKENS, NEW_TOKENS = 50, 48
VERSION = "2"  # 1: NQ's alternatives in the order of their list; 2: the cut counts BOS, NQ drops its question once
SUMMARY = "Summary of information above..."  # begins the question that SWDE's texts end with
MARKERS = re.compile(r"\[PAR\]|\[DOC\]|\[TLE\]")  # TriviaQA's paragraphs, documents and titles

Document = Mapping[str, Any]


class TextTokenizer(Protocol):
    """What the cut asks of a tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Ids of a text, with the special tokens that it adds by itself."""
        ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = ...) -> str:
        """Text of ids."""
        ...


def contains(prediction: str, answers: Sequence[str]) -> int:
    """1 if the prediction contains an answer as it is spelled, letter case aside; empty answers do not count."""
    return int(any(re.search(re.escape(answer), prediction, re.IGNORECASE) for answer in answers if answer.strip()))


def cut_document(
    text: str,
    anchors: Sequence[str] | None,
    tokenizer: TextTokenizer,
    length: int,
    alternatives: Sequence[str] = (),
    fallback: int | None = None,
) -> str:
    """`length` - 50 tokens of a document, special ones counted but left out of the text.

    Args:
        text: the document.
        anchors: the cut is centered on the first place where one of them stands, letter case aside; where none does,
            on an alternative. None: the document's head.
        tokenizer: measures and cuts.
        length: tokens, of which 50 are set aside for question and answer.
        alternatives: the first in the list that stands in the text counts, wherever that is; where none does, the cut
            is centered on the document's end.
        fallback: center in tokens, instead of the end of a document that is too long to stay whole.
    """
    text = text.strip()
    tokens = tokenizer.encode(text)
    wanted = length - ANSWER_TOKENS
    center = 0
    if anchors is not None:
        place = _find(text, anchors, alternatives)
        before = text[: -1 if place is None else place]  # without its last character, as published
        center = len(tokenizer.encode(before))
        if place is None and fallback is not None and center > wanted:
            center = fallback
    start = max(0, center - wanted // 2)
    return tokenizer.decode(tokens[start : start + wanted], skip_special_tokens=True)


def _find(text: str, anchors: Sequence[str], alternatives: Sequence[str]) -> int | None:
    """First place of any anchor, else that of the first alternative in the list; letter case aside."""
    anchor_places, other_places = (
        [match.start() for each in words if (match := re.search(re.escape(each), text, re.IGNORECASE))]
        for words in (anchors, alternatives)
    )
    return min(anchor_places) if anchor_places else next(iter(other_places), None)


def _without_question(text: str, question: str) -> str:
    """Drop repetitions of the question from the end of a document."""
    while question and text.lower().endswith(question.lower()):
        text = text[: -len(question)]
    return text


def _capitalized(key: str) -> str:
    return key[:1].upper() + key[1:]


def swde_prompt(document: Document) -> str:
    """TEXT. KEY:"""
    text = _without_question(document["text"].split(SUMMARY)[0], document["key"] + ":")
    return f"{text.strip().strip('.')}. {_capitalized(document['key'])}:".strip()


def fda_prompt(document: Document) -> str:
    """TEXT. KEY:"""
    text = _without_question(document["text"], document["key"] + ":").strip("\n").strip(".")
    return f"{text}. {_capitalized(document['key'])}:".strip()


def squad_prompt(document: Document) -> str:
    """The text, which ends where the answer begins."""
    return str(document["text"]).strip()


def _asked(context: str, question: str) -> str:
    return f"{context.strip().strip('.')}. {question}".strip()


def drop_prompt(document: Document) -> str:
    """CONTEXT. QUESTION"""
    question = document["question"].strip()
    return _asked(_without_question(document["context"].strip(), question), question)


def nq_prompt(document: Document) -> str:
    """CONTEXT. QUESTION; a context that ends with the question loses it once, as it is spelled"""
    question = document["question"].strip()
    return _asked(document["context"].strip().removesuffix(question), question)


def triviaqa_prompt(document: Document) -> str:
    """CONTEXT. QUESTION, without TriviaQA's markers"""
    question = document["question"].strip()
    return _asked(_without_question(MARKERS.sub("", document["context"].strip()), question), question)


@dataclass(frozen=True)
class RecallTask:
    """How one data set of the suite is asked.

    Attributes:
        prompt: from a document that is cut already.
        text_key: the field that is cut.
        anchor_keys: fields that the cut is centered on; None: the document's head.
        answer_key: the field with the answer or answers.
    """

    prompt: Callable[[Document], str]
    text_key: str
    anchor_keys: tuple[str, ...] | None
    answer_key: str

    def answers(self, document: Document) -> list[str]:
        """The accepted answers."""
        value = document[self.answer_key]
        return [value] if isinstance(value, str) else [str(each) for each in value]

    def anchors(self, document: Document) -> list[str] | None:
        """What the cut is centered on; None: the document's head."""
        if self.anchor_keys is None:
            return None
        values = [document[key] for key in self.anchor_keys]
        return [each if isinstance(each, str) else (list(each) or [""])[0] for each in values]

    def can_be_cut(self, document: Document) -> bool:
        """Whether every anchor has two characters or more."""
        return all(len(anchor) > 1 for anchor in self.anchors(document) or ())

    def cut(self, document: Document, tokenizer: TextTokenizer, length: int) -> dict[str, Any]:
        """The document with its text cut."""
        position = document.get("tok_pos")  # NQ's: about where the answer is, in tokens
        short = cut_document(
            str(document[self.text_key]),
            self.anchors(document),
            tokenizer,
            length,
            alternatives=document.get("alt_answers") or (),
            fallback=None if position is None else int(position),
        )
        return {**document, self.text_key: short}


SWDE = RecallTask(swde_prompt, "text", ("key", "value"), "value")
FDA = RecallTask(fda_prompt, "text", ("key", "value"), "value")
SQUAD = RecallTask(squad_prompt, "text", ("value",), "value")
TRIVIAQA = RecallTask(triviaqa_prompt, "context", None, "answers")
DROP = RecallTask(drop_prompt, "context", None, "answers")
NQ = RecallTask(nq_prompt, "context", ("answers",), "answers")


def recall_card(name: str, task: RecallTask, data: DataSet, cut_length: int) -> TaskCard:
    """A card whose documents are cut to `cut_length` tokens; a limit counts those that can be."""
    split = data.splits[0]

    def build(setting: TaskSetting) -> ConfigurableTask:
        from datasets import Dataset  # noqa: PLC0415

        rows = setting.source.split(data, split)
        documents = [document for row in rows if task.can_be_cut(document := _document(row))]
        if not documents:
            raise InputError(
                f"task {name}: none of the {len(rows)} rows of {data.name} has an answer of two characters or more, on "
                "which its cut is centered; nothing can be scored on it"
            )
        chosen = documents[: setting.limit]
        tokenizer: Any = setting.tokenizer
        # the cut depends on the tokenizer: runs of two models are paired by what a row was before it
        cut = [{**task.cut(each, tokenizer, cut_length), ROW_HASH: json_fingerprint(each)} for each in chosen]
        return make_task(
            {
                "task": name,
                "output_type": "generate_until",
                "test_split": split,
                "doc_to_text": task.prompt,
                "doc_to_target": lambda document: " " + (task.answers(document) or [""])[0],
                "process_results": lambda document, results: {"contains": contains(results[0], task.answers(document))},
                "generation_kwargs": {"until": ["\n"], "max_gen_toks": NEW_TOKENS, "do_sample": False},
                "metric_list": [{"metric": "contains", "aggregation": "mean", "higher_is_better": True}],
                "num_fewshot": 0,
                "metadata": {"version": int(VERSION)},
            },
            {split: Dataset.from_list(cut)},
        )

    def _document(row: Document) -> Document:
        """Without the question at the end of SWDE's texts, which is no part of the document."""
        return {**row, "text": row["text"].split(SUMMARY)[0]} if task is SWDE else row

    def count(setting: TaskSetting) -> int:
        return sum(task.can_be_cut(row) for row in setting.source.split(data, split))

    def reads(_: TaskSetting) -> list[tuple[DataSet, str]]:
        return [(data, split)]

    def describe(setting: TaskSetting) -> dict[str, Any]:
        return {**setting.source.describe(data), "split": split, "cut_tokens": cut_length}

    about = {"name": data.name, "hub": data.hub, "config": data.config, "license": data.license}
    prompt = " ".join((task.prompt.__doc__ or "").split())
    return TaskCard(
        name,
        about,
        prompt,
        "contains,none",
        0,
        VERSION,
        build,
        describe,
        count=count,
        reads=reads,
        tokens=NEW_TOKENS + 1,
    )


def recall_cards(length: int) -> tuple[TaskCard, ...]:
    """The six tasks at one length of the document in tokens."""
    return (
        recall_card(f"recall_swde_{length}", SWDE, data_sets.SWDE, length),
        recall_card(f"recall_fda_{length}", FDA, data_sets.FDA, length),
        recall_card(f"recall_squad_{length}", SQUAD, data_sets.SQUAD, length),
        recall_card(f"recall_triviaqa_{length}", TRIVIAQA, data_sets.TRIVIAQA, length),
        recall_card(f"recall_drop_{length}", DROP, data_sets.DROP, length),
        recall_card(f"recall_nq_{length}", NQ, data_sets.natural_questions(length), NQ_LENGTH),
    )
