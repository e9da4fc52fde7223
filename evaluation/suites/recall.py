"""The recall suite: find in a document what a question asks for, and say it.

Prompts, cut, stop and metric follow the published evaluation (Arora et al. 2024, "Just read twice", github.com/
HazyResearch/prefix-linear-attention at 7490f22): zero-shot, greedy, at most 48 tokens, up to the first newline; a
document scores 1 if the text contains one of its answers, letter case aside.

The cut keeps `length` - 50 tokens of the document: centered on the answer (SWDE, FDA, SQuAD, NQ), or the document's
head (TriviaQA, DROP). Tokens are those of the evaluated model, as published. Documents whose answer has fewer than two
characters are left out where the cut depends on the answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from evaluation.suites import data_sets
from evaluation.suites.data_sets import DataSet
from evaluation.suites.task_card import TaskCard, TaskSetting, make_task

if TYPE_CHECKING:
    from lm_eval.api.task import ConfigurableTask

LENGTHS = (512, 1024, 2048)
NQ_LENGTH = 2000  # NQ's documents come in three sizes; all are cut to this many tokens
ANSWER_TOKENS, NEW_TOKENS = 50, 48
SUMMARY = "Summary of information above..."  # begins the question that SWDE's texts end with
MARKERS = re.compile(r"\[PAR\]|\[DOC\]|\[TLE\]")  # TriviaQA's paragraphs, documents and titles

Document = Mapping[str, Any]


class TextTokenizer(Protocol):
    """What the cut asks of a tokenizer."""

    def encode(self, text: str, add_special_tokens: bool = ...) -> list[int]:
        """Ids of a text."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of ids."""
        ...


def contains(prediction: str, answers: Sequence[str]) -> int:
    """1 if the prediction contains an answer as it is spelled, letter case aside; empty answers do not count."""
    return int(any(re.search(re.escape(answer), prediction, re.IGNORECASE) for answer in answers if answer.strip()))


def cut_document(text: str, anchors: Sequence[str] | None, tokenizer: TextTokenizer, length: int) -> str:
    """`length` - 50 tokens of a document.

    Args:
        text: the document.
        anchors: the cut is centered on the first place where one of them stands, letter case aside; where none does,
            it is the document's end. None: the document's head.
        tokenizer: measures and cuts.
        length: tokens, of which 50 are set aside for question and answer.
    """
    text = text.strip()
    tokens = tokenizer.encode(text, add_special_tokens=False)
    wanted = length - ANSWER_TOKENS
    center = 0
    if anchors is not None:
        found = [match.start() for anchor in anchors if (match := re.search(re.escape(anchor), text, re.IGNORECASE))]
        before = text[: min(found)] if found else text
        center = len(tokenizer.encode(before, add_special_tokens=False))
    start = max(0, center - wanted // 2)
    return tokenizer.decode(tokens[start : start + wanted])


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


def question_prompt(document: Document) -> str:
    """CONTEXT. QUESTION, for DROP and NQ."""
    question = document["question"].strip()
    context = _without_question(document["context"].strip(), question)
    return f"{context.strip().strip('.')}. {question}".strip()


def triviaqa_prompt(document: Document) -> str:
    """CONTEXT. QUESTION, without TriviaQA's markers."""
    return question_prompt({**document, "context": MARKERS.sub("", document["context"])})


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

    def cut(self, document: Document, tokenizer: TextTokenizer, length: int) -> dict[str, Any] | None:
        """The document with its text cut; None where an anchor has fewer than two characters."""
        text = str(document[self.text_key])
        anchors = None
        if self.anchor_keys is not None:
            values = [document[key] for key in self.anchor_keys]
            anchors = [each if isinstance(each, str) else (list(each) or [""])[0] for each in values]
            if any(len(anchor) <= 1 for anchor in anchors):
                return None
            if not any(re.search(re.escape(a), text, re.IGNORECASE) for a in anchors):
                anchors = list(document.get("alt_answers") or anchors)
        return {**document, self.text_key: cut_document(text, anchors, tokenizer, length)}


SWDE = RecallTask(swde_prompt, "text", ("key", "value"), "value")
FDA = RecallTask(fda_prompt, "text", ("key", "value"), "value")
SQUAD = RecallTask(squad_prompt, "text", ("value",), "value")
TRIVIAQA = RecallTask(triviaqa_prompt, "context", None, "answers")
DROP = RecallTask(question_prompt, "context", None, "answers")
NQ = RecallTask(question_prompt, "context", ("answers",), "answers")


def recall_card(name: str, task: RecallTask, data: DataSet, cut_length: int) -> TaskCard:
    """A card whose documents are cut to `cut_length` tokens."""
    split = data.splits[0]

    def build(setting: TaskSetting) -> ConfigurableTask:
        from datasets import Dataset  # noqa: PLC0415

        def cut(rows: Any) -> Any:
            if task is SWDE:  # the question at the text's end is no part of the document
                rows = [{**row, "text": row["text"].split(SUMMARY)[0]} for row in rows]
            kept = (task.cut(row, setting.tokenizer, cut_length) for row in rows)  # type: ignore[arg-type]
            return Dataset.from_list([row for row in kept if row is not None])

        return make_task(
            {
                "task": name,
                "output_type": "generate_until",
                "test_split": split,
                "process_docs": cut,
                "doc_to_text": task.prompt,
                "doc_to_target": lambda document: " " + (task.answers(document) or [""])[0],
                "process_results": lambda document, results: {"contains": contains(results[0], task.answers(document))},
                "generation_kwargs": {"until": ["\n"], "max_gen_toks": NEW_TOKENS, "do_sample": False},
                "metric_list": [{"metric": "contains", "aggregation": "mean", "higher_is_better": True}],
                "num_fewshot": 0,
                "metadata": {"version": 0},
            },
            {split: setting.rows(data, split)},
        )

    def describe(setting: TaskSetting) -> dict[str, Any]:
        return {**setting.source.describe(data), "split": split, "cut_tokens": cut_length}

    about = {"name": data.name, "hub": data.hub, "config": data.config, "license": data.license}
    prompt = " ".join((task.prompt.__doc__ or "").split())
    return TaskCard(name, about, prompt, "contains,none", 0, "0", build, describe)


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
