"""Run tasks one after another and keep each one's record, so that a stopped evaluation goes on where it was.

A record is reused only if it was made by the same model (weights, configuration, tokenizer) under the same settings by
the same versions of the libraries that score.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evaluation.example_draws import draw_as_one_rank
from evaluation.files import plain_json, write_output
from evaluation.fingerprints import config_fingerprint, tokenizer_fingerprint, weights_fingerprint
from evaluation.suite_scores import grouped_score, stderr_name, task_score
from evaluation.suites.data_sets import UnavailableError
from evaluation.suites.perplexity import METRICS, standard_error
from evaluation.suites.task_card import ROW_HASH, TaskCard, TaskSetting
from orthros_train.errors import InputError

if TYPE_CHECKING:
    from lm_eval.api.task import ConfigurableTask

    from evaluation.lm_eval_model import OrthrosLM

# What lm-eval's results of a task hold besides `results`, by task name.
PER_TASK = ("configs", "versions", "n-shot", "higher_is_better", "n-samples")
Missing = dict[str, str]  # why tasks are left out, by their names
BOOTSTRAP_ITERS = 1000  # resamples of the errors that have no formula


class GaveUpError(Exception):
    """Some rank's adapter was told to give up; raised on all of them."""


class TaskRunner:
    """Runs tasks with one model and stores their records in `folder`/tasks.

    Args:
        lm: the adapter.
        folder: the evaluation's output.
        setting: data source, tokenizer, seed, limit of documents.
        chat: use the tokenizer's chat template.
        samples: store every document with its prompt and answers, too.
    """

    def __init__(
        self, lm: OrthrosLM, folder: Path, setting: TaskSetting, chat: bool = False, samples: bool = False
    ) -> None:
        self._lm, self._folder, self._setting = lm, folder, setting
        self._chat, self._samples = chat, samples
        self._environment = {f"{name}_version": version(name) for name in ("lm_eval", "transformers")}
        self._key = {
            "weights": weights_fingerprint(lm.model),
            "config": config_fingerprint(lm.model.config),
            "tokenizer": tokenizer_fingerprint(lm.tokenizer),
            "environment": self._environment,
            "bootstrap_iters": BOOTSTRAP_ITERS,
            "model": lm.get_model_info(),
            "add_bos_token": lm.add_bos_token,
            "limit": setting.limit,
            "chat": chat,
            "seed": setting.seed,
        }

    def run(self, card: TaskCard) -> dict[str, Any]:
        """A task's record, from `folder` where it is there already; {} on ranks other than 0.

        Raises:
            InputError: no data, or a model that the task cannot be asked of.
            GaveUpError: the adapter was told to give up; nothing is stored.
        """
        metadata = card.metadata(self._setting)
        key = self._key | {"task": metadata, "documents": self._setting.documents}
        stored = self._agreed(self._stored(card, key) if self._lm.rank == 0 else None)
        if stored is not None:
            return stored
        before = self._counts(card)
        output = self._evaluate(card)
        if self._any_rank_gave_up():
            raise GaveUpError(card.name)
        counted = {name: count - before[name] for name, count in self._counts(card).items()}
        gathered = self._lm.gather_object(counted)
        if output is None or gathered is None:
            return {}
        counts = {name: sum(of_rank[name] for of_rank in gathered) for name in counted}
        record = self._record(card, metadata, output, counts) | {"key": key, "samples": self._samples}
        self._store(card, record, output["samples"][card.name])
        return record

    def _counts(self, card: TaskCard) -> dict[str, int]:
        """How many of a task's requests have so far been counted for a reason that the report states."""
        return {"truncated": self._lm.truncated[card.name], "not_finite": self._lm.not_finite[card.name]}

    def _paths(self, card: TaskCard) -> tuple[Path, Path]:
        """Where a task's record and its samples are kept."""
        return self._folder / "tasks" / f"{card.name}.json", self._folder / "samples" / f"{card.name}.jsonl"

    def _stored(self, card: TaskCard, key: Mapping[str, Any]) -> dict[str, Any] | None:
        """An earlier record, if it was made under exactly these settings and has its samples where they are wanted."""
        path, samples = self._paths(card)
        record = _stored_record(path, key)
        lacks_samples = record is not None and self._samples and not (record.get("samples") and samples.is_file())
        return None if lacks_samples else record

    def _store(self, card: TaskCard, record: Mapping[str, Any], found: Sequence[Mapping[str, Any]]) -> None:
        """Samples first, so that a record that says it has them does; those of an earlier record are removed."""
        path, samples = self._paths(card)
        if self._samples:
            lines = (json.dumps(plain_json(_plain_sample(sample)), ensure_ascii=False) for sample in found)
            write_output(samples, "\n".join(lines) + "\n")
        else:
            samples.unlink(missing_ok=True)
        write_output(path, json.dumps(record, indent=1, default=str) + "\n")

    def _agreed(self, value: Any) -> Any:
        """Rank 0's value on every rank."""
        if self._lm.world_size == 1:
            return value
        from torch import distributed  # noqa: PLC0415

        values = [value]
        distributed.broadcast_object_list(values, src=0)
        return values[0]

    def _any_rank_gave_up(self) -> bool:
        import torch  # noqa: PLC0415

        return bool(self._lm.all_gather(torch.tensor(int(self._lm.gave_up), device=self._lm.device)).any())

    def _evaluate(self, card: TaskCard) -> dict[str, Any] | None:
        """What lm-eval found, on rank 0. A task with fewer documents than ranks is rank 0's alone: lm-eval wants at
        least one on every rank."""
        task = card.build(self._setting)
        task.set_fewshot_seed(self._setting.seed)
        if min(len(task.eval_docs), self._setting.limit or math.inf) >= self._lm.world_size:
            return self._ask_harness(card, task)
        if self._lm.rank:
            return None
        with self._lm.alone():
            return self._ask_harness(card, task)

    def _ask_harness(self, card: TaskCard, task: ConfigurableTask) -> dict[str, Any] | None:
        from lm_eval.evaluator import evaluate  # noqa: PLC0415

        draw_as_one_rank(task, self._lm.rank, self._lm.world_size)
        with contextlib.redirect_stdout(io.StringIO()), _without_bars():  # it prints how far its bootstrap is
            output: Any = evaluate(
                lm=self._lm,
                task_dict={"tasks": {card.name: task}},
                limit=self._setting.limit,
                log_samples=True,
                apply_chat_template=self._chat,
                fewshot_as_multiturn=self._chat,
                bootstrap_iters=0,
            )
            if output is not None:
                _score_in_document_order(task, output["results"][card.name], output["samples"][card.name])
        return output

    def _record(
        self, card: TaskCard, metadata: dict[str, Any], output: dict[str, Any], counts: Mapping[str, int]
    ) -> dict[str, Any]:
        results = output["results"][card.name]
        if card.metric not in results:
            raise InputError(f"task {card.name} gave {sorted(results)}, not its headline metric {card.metric}")
        name, chosen_filter = card.metric.split(",")
        documents = [
            _document(sample, name) for sample in output["samples"][card.name] if sample["filter"] == chosen_filter
        ]
        harness = {part: output[part].get(card.name) for part in PER_TASK}
        if self._setting.limit is not None and card.count is not None:  # lm-eval saw no more rows than the limit
            harness["n-samples"] |= {"original": card.count(self._setting)}
        record = {
            "task": metadata,
            "results": results,
            "harness": harness,
            "documents": sorted(documents, key=lambda document: document["doc_id"]),
            **counts,
            "higher_is_better": card.higher_is_better,
            "environment": self._environment,
            "task_hash": _task_hash(output["samples"][card.name]),
        }
        return plain_json(record)


@contextlib.contextmanager
def _without_bars() -> Iterator[None]:
    """Without the harness's own bars, two for each task. tqdm reads TQDM_DISABLE only when it is imported."""
    import tqdm  # noqa: PLC0415
    from lm_eval.api import task  # noqa: PLC0415

    shown: Any = tqdm.tqdm
    tqdm.tqdm = task.tqdm = functools.partial(shown, disable=True)
    try:
        yield
    finally:
        tqdm.tqdm = task.tqdm = shown


def _score_in_document_order(task: ConfigurableTask, results: dict[str, Any], samples: list[dict[str, Any]]) -> None:
    """Sort `samples` as one rank gives them, filter by filter, and write their scores and errors into `results`.

    lm-eval's come from the samples in the order of the ranks, on which sums and resamples depend; and a rank with fewer
    documents than another is asked its last request twice.
    """
    from lm_eval.api.metrics import stderr_for_metric  # noqa: PLC0415

    filters = list(dict.fromkeys(sample["filter"] for sample in samples))
    samples.sort(key=lambda sample: (filters.index(sample["filter"]), sample["doc_id"]))
    for sample in samples:
        sample["resps"] = [answers[: task.config.repeats] for answers in sample["resps"]]
    for metric, aggregate in task.aggregation().items():
        for chosen in filters:
            name = f"{metric},{chosen}"
            if name not in results:
                continue
            items = [sample[metric] for sample in samples if sample["filter"] == chosen]
            results[name] = aggregate(items)
            if metric in METRICS:
                error = standard_error(metric, items)
            else:
                estimate = stderr_for_metric(aggregate, BOOTSTRAP_ITERS)
                error = estimate(items) if estimate is not None and len(items) > 1 else None
            results[stderr_name(name)] = "N/A" if error is None else error


def _document(sample: Mapping[str, Any], metric: str) -> dict[str, Any]:
    """What a record keeps of a document: who it is and how it was scored."""
    row = {ROW_HASH: sample["doc"][ROW_HASH]} if ROW_HASH in sample["doc"] else {}
    return {"doc_id": sample["doc_id"], "doc_hash": sample["doc_hash"], **row, "value": _number(sample[metric])}


def _task_hash(samples: Sequence[Mapping[str, Any]]) -> str:
    """lm-eval's `task_hashes` of a task: over documents, prompts and targets."""
    from lm_eval.utils import hash_string  # noqa: PLC0415

    return str(hash_string("".join(each["doc_hash"] + each["prompt_hash"] + each["target_hash"] for each in samples)))


def _plain_sample(sample: Mapping[str, Any]) -> dict[str, Any]:
    """A line of the samples' file: everything that lm-eval logs, with numbers of Python's."""
    return {**sample, **{metric: _number(sample[metric]) for metric in sample["metrics"]}}


def _number(value: Any) -> Any:
    """A document's value of a metric: a number, or (sum, count) of a perplexity."""
    return [float(part) for part in value] if isinstance(value, tuple | list) else float(value)


def _stored_record(path: Path, key: Mapping[str, Any]) -> dict[str, Any] | None:
    """An earlier record, if it was made under exactly these settings."""
    if not path.is_file():
        return None
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path} is not JSON ({error}); remove it and run again") from error
    if not isinstance(record, dict):
        raise InputError(f"{path} is no record of a task; remove it and run again")
    same = record.get("key") == json.loads(json.dumps(key, default=str))
    return record if same else None


def harness_results(
    records: Mapping[str, Mapping[str, Any]], config: Mapping[str, Any], groups: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    """The records in the layout of lm-eval's results.json.

    Args:
        records: of tasks, by name.
        config: what lm-eval says of model and settings.
        groups: names of the tasks that count as one, by the group's name.
    """
    merged: dict[str, Any] = {"results": {name: dict(record["results"]) for name, record in records.items()}}
    for part in PER_TASK:
        merged[part] = {name: record["harness"][part] for name, record in records.items()}
    merged["group_subtasks"] = {group: list(members) for group, members in groups.items()}
    for group, members in groups.items():
        merged.setdefault("groups", {})[group] = merged["results"][group] = _group_results(group, members, records)
        for part in ("versions", "n-shot", "higher_is_better"):
            merged[part][group] = merged[part][members[0]]
    merged["task_hashes"] = {name: record["task_hash"] for name, record in records.items()}
    merged["config"] = dict(config)
    for record in records.values():
        merged |= record["environment"]
    return merged


def _group_results(group: str, members: Sequence[str], records: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What lm-eval writes of a group: the headline metric, weighted by documents."""
    score = grouped_score(group, [task_score(name, records[name]) for name in members])
    return {
        "alias": group,
        "name": group,
        "sample_len": score.documents,
        score.metric: score.value,
        stderr_name(score.metric): "N/A" if score.stderr is None else score.stderr,
        "sample_count": {score.metric: score.documents},
    }


def require_data(
    cards: Sequence[TaskCard],
    setting: TaskSetting,
    skip: bool,
    of_all_ranks: Callable[[Missing], Sequence[Missing]] = lambda missing: [missing],
) -> tuple[list[TaskCard], dict[str, str]]:
    """The tasks that can be asked, all that they read having been opened, and why the others are left out.

    Args:
        cards: of the tasks.
        setting: data source, and the model's length.
        skip: leave out tasks that the source has no data for.
        of_all_ranks: gathers what is missing on each rank, so that all leave out the same tasks.

    Returns:
        The tasks that are left, and the reasons by name of the others; a task that is longer than the model can read
        is always one of these.

    Raises:
        InputError: data are missing and `skip` is false, are damaged, or no task is left.
    """
    missing: Missing = {}
    for card in cards:
        if (reason := _too_long(card, setting)) is not None:
            missing[card.name] = reason
            continue
        try:
            card.describe(setting)
            for data_set, split in card.reads(setting):
                setting.source.split(data_set, split)
        except UnavailableError as error:
            if not skip:
                raise InputError(f"task {card.name}: {error}; or leave it out with --skip-unavailable") from error
            missing[card.name] = str(error)
        except InputError as error:
            raise InputError(f"task {card.name}: {error}") from error
    for of_rank in reversed(of_all_ranks(missing)):  # the first rank's reason counts
        missing |= of_rank
    present = [card for card in cards if card.name not in missing]
    if not present:
        task, reason = next(iter(missing.items()))
        raise InputError(f"no task is left: {task}: {reason}")
    return present, missing


def _too_long(card: TaskCard, setting: TaskSetting) -> str | None:
    """Why a model of the setting's length cannot be asked, if it cannot."""
    if card.tokens is None or setting.max_length is None or card.tokens <= setting.max_length:
        return None
    shorter = "ask for smaller --lengths, or " if card.name.startswith("long_") else ""
    return (
        f"it takes {card.tokens:,} tokens, and the model reads {setting.max_length:,}; {shorter}evaluate a model with "
        "more positions"
    )
