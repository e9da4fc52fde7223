"""The perplexity suite: WikiText and any text, per token, per byte and per word.

The log-likelihood of a document is lm-eval's rolling one: disjoint windows of the model's length, each token predicted
once. Word and byte counts of WikiText are those of the page before detokenization, as in lm-eval's own task.
"""

from __future__ import annotations

import hashlib
import io
import math
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evaluation.suites import data_sets
from evaluation.suites.task_card import TaskCard, TaskSetting, make_task
from evaluation.text_tokens import whole_text
from orthros_train.errors import InputError

if TYPE_CHECKING:
    from lm_eval.api.task import ConfigurableTask

METRICS = ("word_perplexity", "byte_perplexity", "bits_per_byte", "token_perplexity")
WIKITEXT_VERSION, TEXT_VERSION = "2", "1"  # lm-eval's, and ours


def _perplexity(items: Sequence[tuple[float, int]]) -> float:
    """exp(-Σ log-likelihood / Σ units); infinity where a float cannot hold it, as of a long text without spaces, which
    is one word."""
    try:
        return math.exp(-_mean(items))
    except OverflowError:
        return math.inf


def _bits(items: Sequence[tuple[float, int]]) -> float:
    """-Σ log-likelihood / Σ units / ln 2."""
    return -_mean(items) / math.log(2)


def _mean(items: Sequence[tuple[float, int]]) -> float:
    return sum(value for value, _ in items) / sum(count for _, count in items)


def standard_error(metric: str, items: Sequence[tuple[float, int]]) -> float | None:
    """Of one of METRICS, by the bootstrap over documents; None for a single document or an infinite perplexity."""
    import numpy as np  # noqa: PLC0415

    from evaluation.bootstrap import resampled_ratios  # noqa: PLC0415

    if len(items) < 2:
        return None
    nats = -resampled_ratios(items)
    with np.errstate(over="ignore", invalid="ignore"):
        error = float(np.std(nats / math.log(2) if metric == "bits_per_byte" else np.exp(nats), ddof=1))
    return error if math.isfinite(error) else None


def count_units(log_likelihood: float, text: str, tokens: int) -> dict[str, tuple[float, int]]:
    """A document's log-likelihood with its words, bytes and tokens, by metric."""
    size = len(text.encode("utf-8"))
    return {
        "word_perplexity": (log_likelihood, len(re.split(r"\s+", text))),
        "byte_perplexity": (log_likelihood, size),
        "bits_per_byte": (log_likelihood, size),
        "token_perplexity": (log_likelihood, tokens),
    }


def _task(
    name: str, version: str, rows: Any, setting: TaskSetting, target: Callable[[Any], str], text: Callable[[Any], str]
) -> ConfigurableTask:
    def judge(document: Any, results: Sequence[float]) -> dict[str, tuple[float, int]]:
        return count_units(results[0], text(document), len(whole_text(setting.tokenizer, target(document))))

    aggregations = [_perplexity, _perplexity, _bits, _perplexity]
    return make_task(
        {
            "task": name,
            "output_type": "loglikelihood_rolling",
            "test_split": "test",
            "doc_to_text": "",
            "doc_to_target": target,
            "process_results": judge,
            "metric_list": [
                {"metric": metric, "aggregation": aggregation, "higher_is_better": False}
                for metric, aggregation in zip(METRICS, aggregations, strict=True)
            ],
            "num_fewshot": 0,
            "metadata": {"version": int(version)},
        },
        {"test": rows},
    )


def _build_wikitext(setting: TaskSetting) -> ConfigurableTask:
    from lm_eval.tasks.wikitext.preprocess_wikitext import wikitext_detokenizer  # noqa: PLC0415

    rows = setting.rows(data_sets.WIKITEXT_PAGES, "test")
    return _task("wikitext", WIKITEXT_VERSION, rows, setting, wikitext_detokenizer, lambda document: document["page"])


WIKITEXT = TaskCard(
    "wikitext",
    {
        "name": data_sets.WIKITEXT_PAGES.name,
        "hub": data_sets.WIKITEXT_PAGES.hub,
        "config": data_sets.WIKITEXT_PAGES.config,
        "license": data_sets.WIKITEXT_PAGES.license,
    },
    "whole pages, detokenized as lm-eval does",
    "word_perplexity,none",
    0,
    WIKITEXT_VERSION,
    _build_wikitext,
    lambda setting: {**setting.source.describe(data_sets.WIKITEXT_PAGES), "split": "test"},
    higher_is_better=False,
    count=lambda setting: len(setting.source.split(data_sets.WIKITEXT_PAGES, "test")),
    reads=lambda _: [(data_sets.WIKITEXT_PAGES, "test")],
)


def text_card(path: Path) -> TaskCard:
    """Perplexity of a UTF-8 text file, taken as one document. Raises InputError for a file that is none or empty."""
    try:
        content = path.read_bytes()
        text = io.TextIOWrapper(io.BytesIO(content), encoding="utf-8").read()  # any line end is \n
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path} as UTF-8 text: {error}") from error
    if not text.strip():
        raise InputError(f"{path} is empty; perplexity needs text")
    name = "text_" + (re.sub(r"\W+", "_", path.stem).strip("_").lower() or "file")
    identity = {"source": "file", "bytes": len(text.encode()), "sha256": hashlib.sha256(content).hexdigest()}

    def build(setting: TaskSetting) -> ConfigurableTask:
        from datasets import Dataset  # noqa: PLC0415

        rows = Dataset.from_list([{"text": text}])
        return _task(name, TEXT_VERSION, rows, setting, lambda row: row["text"], lambda row: row["text"])

    about = {"name": path.name, "hub": None, "config": None, "license": "the user's own text"}
    return TaskCard(
        name, about, "the whole file", "byte_perplexity,none", 0, TEXT_VERSION, build, lambda _: identity, False
    )


def text_cards(paths: Iterable[Path]) -> tuple[TaskCard, ...]:
    """Cards of text files. Raises InputError for a file that cannot be scored, or two that would share a name."""
    cards: dict[str, tuple[Path, TaskCard]] = {}
    for path in paths:
        card = text_card(path)
        if card.name in cards:
            raise InputError(
                f"the texts {cards[card.name][0]} and {path} would both be the task {card.name}: rename one, or leave "
                "it out"
            )
        cards[card.name] = (path, card)
    return tuple(card for _, card in cards.values())
