"""What a task is, stated with every score: data, prompt, metric, shots, version."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from evaluation.suites.data_sets import DataSet
from evaluation.suites.data_sources import DataSource

if TYPE_CHECKING:
    from lm_eval.api.task import ConfigurableTask
    from transformers import PreTrainedTokenizerBase


ROW_HASH = "row_hash"  # field of a document: SHA-256 of the row it was made from, if the tokenizer had a part in that

DEFAULT_NEW_TOKENS = 256  # of an answer, where a task does not say


@dataclass(frozen=True)
class TaskSetting:
    """What tasks are built from besides their own definition.

    Attributes:
        source: gives data sets.
        tokenizer: of the evaluated model; some tasks measure their context in its tokens.
        seed: of generated tasks.
        documents: of generated tasks.
        limit: rows of a data set that are looked at; None: all.
        max_length: most tokens that the model reads; None: not known yet.
    """

    source: DataSource
    tokenizer: PreTrainedTokenizerBase
    seed: int = 1234
    documents: int = 100
    limit: int | None = None
    max_length: int | None = None

    def rows(self, data_set: DataSet, split: str) -> Any:
        """The scored rows of a data set, no more than `limit`."""
        rows = self.source.split(data_set, split)
        return rows if self.limit is None else rows.select(range(min(self.limit, len(rows))))


@dataclass(frozen=True)
class TaskCard:
    """One task.

    Attributes:
        name: as in results.json.
        data: its data set's name, hub path, license; {} for a generated one.
        prompt: the prompt in words.
        metric: the headline metric, as lm-eval names it ("acc,none").
        shots: examples before the question.
        version: of the task's definition.
        build: makes lm-eval's task, data included.
        describe: what the results say of the data after `build`.
        higher_is_better: of the headline metric.
        weight_group: tasks of one group count as one in the suite's mean (MMLU's subjects).
        count: how many documents there are without a limit; None: as many as `build` makes.
        reads: the data sets and splits that `build` reads.
        tokens: that a model must be able to read, the answer included, for the task to be asked; None: any number.
    """

    name: str
    data: Mapping[str, Any]
    prompt: str
    metric: str
    shots: int
    version: str
    build: Callable[[TaskSetting], ConfigurableTask]
    describe: Callable[[TaskSetting], dict[str, Any]]
    higher_is_better: bool = True
    weight_group: str | None = None
    count: Callable[[TaskSetting], int] | None = None
    reads: Callable[[TaskSetting], Sequence[tuple[DataSet, str]]] = lambda _: ()
    tokens: int | None = None

    def metadata(self, setting: TaskSetting) -> dict[str, Any]:
        """For the results: everything but code."""
        return {
            "data": {**self.data, **self.describe(setting)},
            "prompt": self.prompt,
            "metric": self.metric,
            "shots": self.shots,
            "version": self.version,
        }


def make_task(config: Mapping[str, Any], splits: Mapping[str, Any]) -> ConfigurableTask:
    """lm-eval's task over rows that are here already."""
    from lm_eval.api.task import ConfigurableTask  # noqa: PLC0415

    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it explains its own command line's options
    return ConfigurableTask(config={**config, "custom_dataset": lambda **_: dict(splits)})
