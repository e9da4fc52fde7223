"""From tasks' results to a suite's table: headline scores, errors, and their mean."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class TaskScore:
    """A task's headline score.

    Attributes:
        task: name; that of the group for tasks that count as one.
        metric: as lm-eval names it.
        value: as measured, accuracies between 0 and 1.
        stderr: None where lm-eval gives none.
        documents: how many were scored.
        shots: examples before the question.
        version: of the task.
        truncated: requests that did not fit into the model and lost the beginning of their context.
        higher_is_better: of the metric.
        not_finite: requests whose log-likelihood is NaN or infinite, so that the value means nothing.
    """

    task: str
    metric: str
    value: float
    stderr: float | None
    documents: int
    shots: int
    version: str
    truncated: int
    higher_is_better: bool
    not_finite: int = 0

    @property
    def is_share(self) -> bool:
        """Whether the value is a share, to be shown in percent."""
        return not self.metric.startswith(("word_perplexity", "byte_perplexity", "bits_per_byte", "token_perplexity"))


@dataclass(frozen=True)
class SuiteScore:
    """A suite's scores.

    Attributes:
        tasks: the scored ones, groups of tasks as one.
        expected: how many there are, scored or not.
        missing: names of tasks left out.
        partial: (group, tasks scored, tasks in all) of groups of which only some were scored.
        mean: of the headline values; None where a mean means nothing.
        stderr: of the mean, from the tasks' own.
    """

    tasks: tuple[TaskScore, ...]
    expected: int
    missing: tuple[str, ...]
    partial: tuple[tuple[str, int, int], ...]
    mean: float | None
    stderr: float | None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


def stderr_name(metric: str) -> str:
    """How lm-eval names the standard error of a metric ("acc,none")."""
    return metric.replace(",", "_stderr,")


def task_score(name: str, record: Mapping[str, Any]) -> TaskScore:
    """The headline of one task's record, as `task_runs.py` writes it."""
    metric = record["task"]["metric"]
    stderr = record["results"].get(stderr_name(metric))
    return TaskScore(
        task=name,
        metric=metric,
        value=float(record["results"][metric]),
        stderr=float(stderr) if isinstance(stderr, int | float) else None,
        documents=len(record["documents"]),
        shots=record["task"]["shots"],
        version=record["task"]["version"],
        truncated=record["truncated"],
        higher_is_better=record["higher_is_better"],
        not_finite=record.get("not_finite", 0),
    )


def suite_score(names: Sequence[tuple[str, str | None]], records: Mapping[str, Any], has_mean: bool) -> SuiteScore:
    """Scores of a suite of (task, group or None) in order.

    Tasks of one group count as one, weighted by their documents, as lm-eval does for MMLU.
    """
    groups: dict[str, list[str]] = {}
    for name, group in names:
        groups.setdefault(group or name, []).append(name)
    scores, missing, partial = [], [], []
    for group, members in groups.items():
        present = [task_score(name, records[name]) for name in members if name in records]
        missing += [name for name in members if name not in records]
        if 0 < len(present) < len(members):
            partial.append((group, len(present), len(members)))
        if present:
            scores.append(present[0] if len(members) == 1 else grouped_score(group, present))
    mean = stderr = None
    if has_mean and scores:
        mean = sum(score.value for score in scores) / len(scores)
        errors = [score.stderr for score in scores if score.stderr is not None]
        if len(errors) == len(scores):
            stderr = math.sqrt(sum(error**2 for error in errors)) / len(scores)
    return SuiteScore(tuple(scores), len(groups), tuple(missing), tuple(partial), mean, stderr)


def grouped_score(group: str, scores: Sequence[TaskScore]) -> TaskScore:
    """Scores of one group's tasks as one, weighted by documents.

    The error is lm-eval's for groups: √(pooled variance / documents), the variance pooled within the tasks. None where
    a task has none or each has a single document.
    """
    documents = sum(score.documents for score in scores)
    errors = [(score.stderr, score.documents) for score in scores if score.stderr is not None]
    stderr = None
    if len(errors) == len(scores) and documents > len(scores):
        variance = sum(n * (n - 1) * error**2 for error, n in errors) / (documents - len(scores))
        stderr = math.sqrt(variance / documents)
    return TaskScore(
        group,
        scores[0].metric,
        sum(score.value * score.documents for score in scores) / documents,
        stderr,
        documents,
        scores[0].shots,
        scores[0].version,
        sum(score.truncated for score in scores),
        scores[0].higher_is_better,
        sum(score.not_finite for score in scores),
    )
