"""Scores of a model that is still being trained: one call, one flat mapping for metrics.jsonl and TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evaluation.run import evaluate_suites
from evaluation.suite_report import suite_scores
from evaluation.suites.catalog import SuiteOptions, find_suites
from evaluation.suites.data_sources import DataSource
from evaluation.suites.task_card import TaskSetting

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from orthros_train.model import OrthrosForCausalLM


def suite_metrics(
    model: OrthrosForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    suites: Sequence[str],
    source: DataSource,
    folder: Path,
    *,
    limit: int | None = None,
    batch_size: int | str = "auto",
    skip_unavailable: bool = True,
) -> dict[str, float]:
    """Score `model` as it is now; it is left in the mode (training or evaluation) that it was in.

    With a torch process group every rank must call this with a whole model of its own; the documents are shared out.

    Args:
        model: all its weights, on one device.
        tokenizer: the run's, as transformers loads it.
        suites: names of suites other than `synthetic`.
        source: gives the data sets.
        folder: records of the tasks are kept there.
        limit: documents of each task.
        batch_size: sequences of a forward, or "auto".
        skip_unavailable: leave out tasks that the source has no data for.

    Returns:
        On rank 0 `SUITE/TASK/METRIC` and `SUITE/mean` to their values, {} on the others.

    Raises:
        InputError: an unknown suite, or no data at all.
    """
    from evaluation.lm_eval_model import OrthrosLM  # noqa: PLC0415  slow imports
    from evaluation.model_source import EvaluatedModel  # noqa: PLC0415

    was_training = model.training
    model.eval()
    try:
        lm = OrthrosLM(EvaluatedModel("a model in training", "training", model, tokenizer), batch_size=batch_size)
        setting = TaskSetting(source, tokenizer, limit=limit)
        chosen = find_suites(suites, SuiteOptions())
        results = evaluate_suites(lm, chosen, setting, folder, skip_unavailable=skip_unavailable)
    finally:
        model.train(was_training)
    if results is None:
        return {}
    return _flat(results)


def _flat(results: Mapping[str, Any]) -> dict[str, float]:
    metrics = {}
    for name, score in suite_scores(results).items():
        for task in score.tasks:
            metrics[f"{name}/{task.task}/{task.metric.split(',')[0]}"] = task.value
        if score.mean is not None:
            metrics[f"{name}/mean"] = score.mean
    return metrics
