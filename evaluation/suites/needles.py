"""The long suite: facts hidden in a long text, in the style of RULER (Hsieh et al. 2024), generated locally.

Four tasks: one fact among filler; one fact among others of its kind; several values of one key; several keys asked at
once. Text and answer are together as long as asked for in tokens of the evaluated model (as in RULER), the facts stand
at random depths, and the score of a document is the share of the expected values that the answer contains. Own texts,
so scores are not RULER's.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from evaluation.suites.task_card import ROW_HASH, TaskCard, TaskSetting, make_task
from orthros_train.errors import InputError

if TYPE_CHECKING:
    from lm_eval.api.task import ConfigurableTask
    from transformers import PreTrainedTokenizerBase

FILLER = (
    "The river ran past the mill and the road went on behind it.",
    "Most of the morning was spent mending nets and counting boats.",
    "Rain came from the west, as it often did at that time of the year.",
    "Nobody in the village could say who had planted the old trees.",
    "A cart with apples stood before the inn until noon.",
    "The bell rang twice, and the market closed earlier than usual.",
)
SYLLABLES = ("ba", "de", "fi", "go", "ka", "lu", "me", "no", "pi", "ra", "so", "tu", "va", "wi", "zo")
NEW_TOKENS = 64
VERSION = 2  # 2: the answer's tokens are part of the length


@dataclass(frozen=True)
class NeedleTask:
    """What is hidden and what is asked.

    Attributes:
        distractors: facts about other keys.
        values: values of each asked key.
        keys: keys that are asked for.
    """

    distractors: int
    values: int
    keys: int


TASKS = {
    "single": NeedleTask(distractors=0, values=1, keys=1),
    "multikey": NeedleTask(distractors=8, values=1, keys=1),
    "multivalue": NeedleTask(distractors=0, values=4, keys=1),
    "multiquery": NeedleTask(distractors=4, values=1, keys=4),
}
MEANINGS = {
    "single": "one fact in filler text; its value is asked for",
    "multikey": "nine facts about different keys; one value is asked for",
    "multivalue": "four values of one key; all are asked for",
    "multiquery": "eight facts; the values of four keys are asked for",
}


def needle_document(
    task: NeedleTask, tokens: int, tokenizer: PreTrainedTokenizerBase, rng: random.Random
) -> dict[str, Any]:
    """One document: `input`, the prompt of at most `tokens` tokens, and `outputs`, the expected values.

    Raises:
        InputError: the facts and the question alone are longer than that.
    """
    keys = _words(task.keys + task.distractors, rng)
    facts = {key: [str(rng.randrange(10**6, 10**7)) for _ in range(task.values)] for key in keys}
    asked = keys[: task.keys]
    needles = [f"The code of {key} is {value}." for key, values in facts.items() for value in values]
    rng.shuffle(needles)
    question = _question(asked, task.values)
    sentences = [rng.choice(FILLER) for _ in range(tokens // 4)]  # more than fit: a sentence has more tokens
    low, high = 0, len(sentences)
    while low < high:  # most sentences such that the prompt fits
        middle = (low + high + 1) // 2
        if _length(tokenizer, [*sentences[:middle], *needles], question) <= tokens:
            low = middle
        else:
            high = middle - 1
    if _length(tokenizer, [*sentences[:low], *needles], question) > tokens:
        raise InputError(
            f"{max(tokens, 0)} tokens before the answer have no room for the facts and the question; ask for greater "
            "--lengths"
        )
    text = sentences[:low]
    for needle in needles:
        text.insert(rng.randint(0, len(text)), needle)
    return {"input": f"{' '.join(text)}\n{question}", "outputs": [v for key in asked for v in facts[key]]}


def _length(tokenizer: PreTrainedTokenizerBase, sentences: Sequence[str], question: str) -> int:
    return len(tokenizer.encode(f"{' '.join(sentences)}\n{question}"))


def _question(keys: Sequence[str], values: int) -> str:
    listed = keys[0] if len(keys) == 1 else ", ".join(keys[:-1]) + " and " + keys[-1]
    if len(keys) == 1 and values == 1:
        return f"Question: What is the code of {listed}?\nAnswer: The code of {listed} is"
    return f"Question: What are all the codes of {listed}?\nAnswer: The codes of {listed} are"


def _words(count: int, rng: random.Random) -> list[str]:
    """Distinct names of three syllables."""
    words: list[str] = []
    while len(words) < count:
        word = "".join(rng.choice(SYLLABLES) for _ in range(3)).capitalize()
        if word not in words:
            words.append(word)
    return words


def share_found(prediction: str, expected: Sequence[str]) -> float:
    """The share of the expected values that the prediction contains."""
    return sum(value in prediction for value in expected) / len(expected)


def needle_card(kind: str, tokens: int) -> TaskCard:
    """One of TASKS at a length of prompt and answer in tokens."""
    name = f"long_{kind}_{tokens}"

    def build(setting: TaskSetting) -> ConfigurableTask:
        from datasets import Dataset  # noqa: PLC0415

        rows = []
        for number in range(setting.documents):
            drawn = f"{setting.seed} {name} {number}"  # the same facts and questions with every tokenizer
            row = needle_document(TASKS[kind], tokens - NEW_TOKENS, setting.tokenizer, random.Random(drawn))
            rows.append({**row, ROW_HASH: sha256(drawn.encode()).hexdigest()})
        return make_task(
            {
                "task": name,
                "output_type": "generate_until",
                "test_split": "test",
                "doc_to_text": lambda document: document["input"],
                "doc_to_target": lambda document: " " + ", ".join(document["outputs"]),
                "process_results": lambda document, results: {
                    "found": share_found(results[0], list(document["outputs"]))
                },
                "generation_kwargs": {"until": ["\n"], "max_gen_toks": NEW_TOKENS, "do_sample": False},
                "metric_list": [{"metric": "found", "aggregation": "mean", "higher_is_better": True}],
                "num_fewshot": 0,
                "metadata": {"version": VERSION},
            },
            {"test": Dataset.from_list(rows)},
        )

    def describe(setting: TaskSetting) -> dict[str, Any]:
        return {"source": "generated", "seed": setting.seed, "documents": setting.documents, "tokens": tokens}

    about = {"name": f"needles, {kind}", "hub": None, "config": None, "license": "generated here"}
    return TaskCard(name, about, MEANINGS[kind], "found,none", 0, str(VERSION), build, describe, tokens=tokens)


def needle_cards(lengths: Sequence[int]) -> tuple[TaskCard, ...]:
    """All four tasks at every length."""
    return tuple(needle_card(kind, tokens) for tokens in lengths for kind in TASKS)
