"""Which documents two runs have in common, and in what their settings are not alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from evaluation.left_out import listed
from evaluation.suites.task_card import ROW_HASH

SETTINGS = {"limit": "limit of documents", "chat": "chat template", "fewshot_seed": "seed"}  # of results.json's config
UNCOMPARED = ("name", "license", "note", "revision_note", "mirrored_from")  # of a task's data: they decide no score
OF_SOURCE = ("revision", "archive_sha256")  # tell nothing more where the sources differ


def paired_values(first: Mapping[str, Any], second: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    """Values of the documents that the records of one task have in common, in the same order.

    A document is told by the row that it was made from, where its record states one, else by its hash. The n-th of
    several that are equal goes with the n-th.
    """
    ours, theirs = _by_document(first), _by_document(second)
    both = [key for key in ours if key in theirs]
    return [ours[key] for key in both], [theirs[key] for key in both]


def _by_document(record: Mapping[str, Any]) -> dict[tuple[str, int], Any]:
    seen: Counter[str] = Counter()
    values = {}
    for document in record["documents"]:
        name = document.get(ROW_HASH, document["doc_hash"])
        values[name, seen[name]] = document["value"]
        seen[name] += 1
    return values


def unlike_settings(runs: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """In what the runs as wholes are not alike; and that limited ones are no benchmarks.

    Args:
        runs: contents of results.json, by name.
    """
    configs = {name: run.get("config", {}) for name, run in runs.items()}
    lines = []
    found = [
        (title, {name: config.get(key) for name, config in configs.items()})
        for key, title in SETTINGS.items()
        if all(key in config for config in configs.values())
    ]
    if unlike := [_by_run(title, values) for title, values in found if _differ(values)]:
        lines.append(f"**The runs are not alike** in {', '.join(unlike)}.")
    if limited := [f"{name}: {config['limit']}" for name, config in configs.items() if config.get("limit")]:
        lines.append(
            f"With a limit of documents per task ({', '.join(limited)}) these are checks of the machinery, not "
            "benchmarks."
        )
    return lines


def unlike_tasks(tasks: Sequence[str], records: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """In what data, prompt, metric, shots or version of tasks are not alike; tasks with the same answer in one line.

    Args:
        tasks: names.
        records: of the tasks, by name, of each run, by name.
    """
    by_answer: dict[str, list[str]] = {}
    for task in tasks:
        facts = {name: _facts(of_run[task]["task"]) for name, of_run in records.items() if task in of_run}
        keys = dict.fromkeys(key for each in facts.values() for key in each)
        unlike = {
            key: values for key in keys if _differ(values := {name: each.get(key) for name, each in facts.items()})
        }
        if "source" in unlike:
            unlike = {key: values for key, values in unlike.items() if key not in OF_SOURCE}
        if unlike:
            answer = ", ".join(_by_run(key, values) for key, values in unlike.items())
            by_answer.setdefault(answer, []).append(task)
    return [f"**Not alike** in {answer}: {listed(names)}." for answer, names in by_answer.items()]


def _facts(task: Mapping[str, Any]) -> dict[str, Any]:
    data = dict(task["data"])
    data["source"] = data.get("mirrored_from", data["source"])  # a mirror's rows are those of its source
    return {key: value for key, value in {**data, **task}.items() if key not in ("data", *UNCOMPARED)}


def _differ(values: Mapping[str, Any]) -> bool:
    return len({str(value) for value in values.values()}) > 1


def _by_run(title: str, values: Mapping[str, Any]) -> str:
    shown = ("none" if value is None else str(value)[:60] for value in values.values())
    return f"{title} ({', '.join(f'{name}: {value}' for name, value in zip(values, shown, strict=True))})"
